"""A training job on several GPUs, traced on one of them: PyTorch's own data parallelism runs on
meta tensors.

``DistributedDataParallel`` and ``fully_shard`` themselves run, in a simulated process group.  Their
allocations are recorded, with time and stream.
"""
