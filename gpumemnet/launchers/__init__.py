"""Training on several GPUs: the lines that start it, the processes of a launch, and what the
parallel code of PyTorch and other libraries does on a simulated GPU.

:mod:`gpumemnet.tracing` records what they allocate; this package imports nothing of it.
"""
