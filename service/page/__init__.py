"""The start page and the API documentation: static files with fixed routes.

:mod:`.routes` makes one route for each file of ``files/``, ``examples/`` and ``docs/`` when the
application is made.
"""
