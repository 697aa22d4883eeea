"""What operators do on CUDA and not on meta tensors, one module for each family of operators; the
:mod:`~gpumemnet.tracing.operators.registry` brings them together."""
