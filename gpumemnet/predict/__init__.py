"""Predictions: bundles, distributions over memory, support, and the predictor that puts them together."""
