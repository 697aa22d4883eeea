"""The HTTP interface, from the request to the response.

* :mod:`.gate` is the middleware around every endpoint.  It asks :mod:`.access` for keys, hosts and
  rates, and tells :mod:`.logs` and :mod:`.metrics`.
* :mod:`.operations` lists the endpoints; :mod:`.openapi` turns them into routes and the description.
* :mod:`.endpoints` reads a body and sends the response; :mod:`.microbatch` collects requests that
  arrive together.
* :mod:`.requests` declares and validates the requests, :mod:`.responses` declares the responses.
* :mod:`.predictions` predicts; :mod:`.problems` turns errors into problem documents (RFC 9457).
* :mod:`.examples` holds example jobs and requests.
"""
