"""Every private or replaced name of PyTorch that extraction and tracing use.

PyTorch promises nothing about these names, so no other module of ``extract``, ``tracing`` and
``sandbox`` touches one. Each is declared with its purpose and, where it can misbehave, with a
probe:

* :mod:`~gpumemnet.torch_private.names`: how a name is declared, found and replaced;
* :mod:`~gpumemnet.torch_private.probes`: runs the probes and says what a PyTorch version lacks;
* one module for each subject: tensors, operators, autograd, modules, optimizers, mixed precision,
  attention, Dynamo, distributed training, and what a training script sees of CUDA.

The package imports nothing of ``gpumemnet`` but its errors.
"""
