"""The REST service: predicts the GPU memory of training jobs over HTTP.

It loads trained models (bundles) and no training code.  The folders, in the order in which a
request meets them:

* :mod:`.middleware`: authenticates, limits, logs and counts every request.
* :mod:`.api`: the prediction endpoints, their request and response models, and the OpenAPI
  description.
* :mod:`.page`: the start page and the API documentation.
* :mod:`.observations`: stores what finished jobs used, and compares it with the predictions.
* :mod:`.serving`: the served release, its self-test, its challenger, and its replacement without a
  restart.
* :mod:`.admin`: the endpoints that change it.

:mod:`.app` assembles the application.  :mod:`.server` runs one worker, and :mod:`.supervisor` runs
several.  :mod:`.searches` is the process beside each worker that searches over batch sizes.
"""
