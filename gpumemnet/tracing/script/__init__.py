"""Traces an unmodified training script: it really runs, but on a GPU that is not there, and stops after two optimizer steps."""
