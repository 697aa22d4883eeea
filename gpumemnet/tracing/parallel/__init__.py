"""A training job on several GPUs, seen from one of them: PyTorch's own data parallelism, run on meta tensors.

Nothing of it is modelled: ``DistributedDataParallel`` and ``fully_shard`` themselves run, on a process group that does not exist.
What they allocate, when, and on which stream is what is recorded.
"""
