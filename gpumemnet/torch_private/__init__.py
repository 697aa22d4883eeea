"""Every private name of PyTorch that extraction and tracing use, and those that are replaced in several
places.

No other module of ``extract``, ``tracing`` and ``sandbox`` touches one:
:mod:`~gpumemnet.torch_private.names` has those of tensors, modules, operators and autograd,
:mod:`~gpumemnet.torch_private.training` what a training step computes with,
:mod:`~gpumemnet.torch_private.script` what a training script sees of CUDA.  Those of training on several
GPUs are in :mod:`gpumemnet.launchers.names`.

The package imports nothing of ``gpumemnet`` but its errors.
"""
