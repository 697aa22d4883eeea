"""Searches for better training plans with Optuna, on folds split by architecture, without a
retraining's holdout."""
