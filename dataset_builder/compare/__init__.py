"""Compares the trace with measured rows, and with what tracing alone gives: ``python -m dataset_builder compare DATASET``."""
