"""Searches for a better training plan with Optuna, on folds split by architecture, and never on what a retraining judges by."""
