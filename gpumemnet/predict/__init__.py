"""Predictions: model bundles, distributions over memory, support checks, and the predictor that
combines them."""
