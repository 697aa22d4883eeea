"""Measures jobs on GPUs: campaigns, the fork server, measuring processes, and NVML."""
