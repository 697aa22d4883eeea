"""The scoreboard: every estimator on the same published runs, by one protocol (``python -m models
scoreboard``)."""
