"""Evaluates candidates on folds split by architecture, and reports what they are worth."""
