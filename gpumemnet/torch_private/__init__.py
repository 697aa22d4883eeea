"""Every private or replaced name of PyTorch that extraction and tracing use.

PyTorch promises nothing about these names, so no other module of ``extract``, ``tracing`` and
``sandbox`` touches one. Each is declared with its purpose and, where it can misbehave, with a
probe:

* :mod:`~gpumemnet.torch_private.names`: how a name is declared, found, replaced and probed;
* one module for each subject: operators and autograd, modules and tensors, what a training step
  computes with on one GPU and on several, and what a training script sees of CUDA.

The package imports nothing of ``gpumemnet`` but its errors.
"""
