"""Administration of the served models: promotes a release to champion without dropping a request, and rolls it back.

A release must pass its self-test before it serves.  A challenger can predict a share of the jobs in the background (shadow
mode), so that it can be compared with the champion.

* :mod:`.routes` and :mod:`.models` are the endpoints below ``/v1/admin``.
* :mod:`.champion` loads releases and swaps them; :mod:`.watch` follows changes of the registry in each worker.
* :mod:`.self_test` tests a release with golden jobs; :mod:`.shadow` runs the challenger; :mod:`.metrics` publishes both.
"""
