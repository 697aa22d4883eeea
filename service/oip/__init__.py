"""The Open Inference Protocol, version 2: predictions for the clients of KServe, Triton and
MLServer.

Jobs are sent in a tensor of JSON documents.  A feature vector alone does not show whether the job's
options and layer kinds lie in a model's support.  Without that, no limit would be reliable.

* :mod:`.routes` is the application; :mod:`.schemas` declares the protocol's request and response
  models.
* :mod:`.request` reads an inference request; :mod:`.models` predicts; :mod:`.outputs` makes the
  output tensors.
* :mod:`.tensors` converts tensors from and to JSON and raw bytes.
"""

from .routes import OipApplication

__all__ = ["OipApplication"]
