"""Traces an unmodified training script: it really runs, on a simulated GPU, and stops after two
optimizer steps."""
