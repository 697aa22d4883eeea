"""GPUs: the catalogue with MIG profiles and CUDA contexts, and which of them a job fits."""
