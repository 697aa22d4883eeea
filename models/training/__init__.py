"""Trains the classifiers and exports them as bundles."""
