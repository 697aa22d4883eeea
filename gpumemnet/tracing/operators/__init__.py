"""What operators do on CUDA and not on meta tensors, one module for each family of operators.

Each family adds its kernels and its scratch memory to the tables of
:mod:`~gpumemnet.tracing.operators.rules`, so importing this folder fills them.
"""

from gpumemnet.tracing.operators import (
    attention,
    elementwise,
    library_workspaces,
    recurrent,
    reductions,
)

__all__ = ["attention", "elementwise", "library_workspaces", "recurrent", "reductions"]
