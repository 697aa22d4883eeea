"""The Open Inference Protocol, version 2: predictions as KServe's, Triton's and MLServer's clients ask for them.

Jobs travel in a tensor of JSON documents, because a feature vector alone does not say whether the job's options and layer kinds
lie in a model's support, and without that no limit could be given honestly.
"""

from .routes import OipApplication

__all__ = ["OipApplication"]
