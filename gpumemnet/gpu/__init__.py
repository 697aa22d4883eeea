"""GPUs: the catalogue with MIG profiles, CUDA contexts and the memory that a process can use."""
