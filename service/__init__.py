"""The REST service: predicts the GPU memory of training jobs over HTTP.

It loads trained models (bundles) and no training code, and runs on uvicorn (:mod:`.__main__`).
:mod:`.app` assembles the application:

* :mod:`.api`: what every request passes, the operations, and the OpenAPI description.
* :mod:`.served_release`: the served release, its test, and its replacement without a restart.
* :mod:`.observations`: stores what finished jobs used, and compares it with the predictions.
* :mod:`.page`: the start page and the API documentation.
"""
