"""Child processes.

:mod:`~gpumemnet.sandbox.process` runs a user's code in one, for extraction, tracing and planning, and
has pools for work of our own.
:mod:`~gpumemnet.sandbox.parent` ends a worker with the process that started it.
:mod:`~gpumemnet.sandbox.user_code` says in one sentence what went wrong in the user's code.
"""
