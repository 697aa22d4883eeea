"""The HTTP interface, from the request to the response.

* :mod:`.admission` is around every operation: bounds of the connection, host, key (:mod:`.access`),
  concurrency, errors.  It tells :mod:`.monitoring`, which logs and counts.
* :mod:`.handlers` reads a body and sends the response; :mod:`.microbatching` puts requests together
  that arrive at once.
* :mod:`.predictions` predicts.
* :mod:`.schemas` declares requests and responses, :mod:`.problems` the errors (RFC 9457).
* :mod:`.operations` lists the operations; :mod:`.openapi` describes them.
* :mod:`.examples` holds example jobs and requests.
"""
