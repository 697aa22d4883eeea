"""Generates training jobs, measures the true GPU memory of each with NVML, and writes the
dataset."""
