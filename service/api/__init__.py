"""Predictions over HTTP: the endpoints below ``/v1``, from the request body to the response.

* :mod:`.routes` lists the endpoints; :mod:`.operations` turns them into routes and the OpenAPI
  description.
* :mod:`.endpoint` reads a body, collects concurrent requests, and sends the response;
  :mod:`.text_response` writes plain text.
* :mod:`.requests` declares and validates the requests; :mod:`.request_errors` explains why one is
  invalid.
* :mod:`.predictions` predicts and makes the responses, which :mod:`.schemas` declares;
  :mod:`.listings` lists models and GPUs.
* :mod:`.job_schema` derives the JSON schema of a job; :mod:`.examples` holds example jobs and
  requests.
* :mod:`.problems` turns errors into problem documents (RFC 9457).
* :mod:`.records` describes the predictions that other modules store or count; :mod:`.prediction_id`
  makes their ids.
"""
