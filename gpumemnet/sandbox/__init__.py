"""Runs a user's code in a child process of its own: :mod:`~gpumemnet.sandbox.parent` asks, :mod:`~gpumemnet.sandbox.child`
answers, and whatever goes wrong between them is one sentence.  Extraction and trace are two such children.
"""
