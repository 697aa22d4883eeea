"""Compares the trace with measured rows, and with what tracing alone gives: ``gpumemnet build
compare DATASET``."""
