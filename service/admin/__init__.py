"""Administration: the endpoints below ``/v1/admin``, which promote a release to champion and roll
it back.

:mod:`.routes` are the endpoints, :mod:`.schemas` their requests and responses.
:mod:`service.serving` does the work.
"""
