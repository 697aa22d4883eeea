"""Retraining: datasets and observations become candidates, and a gate decides which of them takes
the champion's place."""
