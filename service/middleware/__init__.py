"""The middleware around every endpoint: authentication, rate and concurrency limits, logs and
metrics.

* :mod:`.gate` is the one middleware that applies them all.  It looks up the rule of a path in
  :mod:`.paths`.
* :mod:`.keys` authenticates; :mod:`.rate`, :mod:`.limits` and :mod:`.load` bound rate, body and
  concurrency.
* :mod:`.logs` formats log lines; :mod:`.log_sink` writes them.
* :mod:`.metrics` counts requests; :mod:`.worker_metrics` adds up the counts of several workers.
"""
