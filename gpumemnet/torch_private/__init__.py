"""Every private or replaced name of PyTorch that extraction and tracing use.

No other module of ``extract``, ``tracing`` and ``sandbox`` touches one:
:mod:`~gpumemnet.torch_private.names` has those of tensors, modules, operators and autograd,
:mod:`~gpumemnet.torch_private.training` what a training step computes with on one GPU and on
several, :mod:`~gpumemnet.torch_private.script` what a training script sees of CUDA.

The package imports nothing of ``gpumemnet`` but its errors.
"""
