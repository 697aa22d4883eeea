"""Runs a user's code in a child process.

:mod:`~gpumemnet.sandbox.parent` starts the child and sends a request,
:mod:`~gpumemnet.sandbox.child` computes the answer. :mod:`~gpumemnet.sandbox.faults` says in one
sentence what went wrong in the user's code.  Extraction and tracing both use it.
"""
