"""Runs a user's code in a child process.

:mod:`~gpumemnet.sandbox.parent` starts the child and sends a request, :mod:`~gpumemnet.sandbox.child` computes the answer.
Extraction and tracing both use it.
"""
