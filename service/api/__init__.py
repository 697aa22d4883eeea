"""The HTTP interface, from the request to the response.

* :mod:`.access` is the middleware around every operation: keys, hosts, concurrency, errors.  It tells
  :mod:`.monitoring`, which logs and counts.
* :mod:`.handlers` reads a body, collects requests that arrive together, and sends the response.
* :mod:`.predictions` predicts.
* :mod:`.schemas` declares requests and responses, :mod:`.problems` the errors (RFC 9457).
* :mod:`.operations` lists the operations; :mod:`.openapi` describes them.
* :mod:`.examples` holds example jobs and requests.
"""
