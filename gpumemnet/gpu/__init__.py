"""GPUs: the catalogue with MIG profiles and CUDA contexts, and whether a job fits a GPU."""
