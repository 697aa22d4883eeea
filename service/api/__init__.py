"""Predictions over HTTP: the endpoints below ``/v1``, from the request body to the response.

* :mod:`.routes` lists the endpoints; :mod:`.operations` turns them into routes and the OpenAPI description.
* :mod:`.endpoint` and :mod:`.http_body` read a request and send the response; :mod:`.text_response` writes plain text.
* :mod:`.models` declares the request and response models; :mod:`.requests` validates a body against them.
* :mod:`.job_schema` derives the JSON schema of a job; :mod:`.examples` holds example jobs and requests.
* :mod:`.microbatch` collects concurrent requests into one call of :mod:`.answers`, which predicts.
* :mod:`.problems` turns errors into problem documents (RFC 9457).
* :mod:`.records` describes the predictions that other modules store or count; :mod:`.prediction_id` makes their ids.
"""
