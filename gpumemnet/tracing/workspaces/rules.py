"""Memory from the caching allocator that operators use besides the job's tensors.

There are two kinds.  An operator allocates :func:`scratch` and frees it before it returns.  A
thread allocates a :func:`blas_workspace` at its first matrix product and keeps it.
:data:`NEGLECTED` lists the sources that are not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from gpumemnet.torch_private.operators import OpOverload, schema
from gpumemnet.tracing.platform import Platform
from gpumemnet.tracing.workspaces import attention as attention_scratch
from gpumemnet.tracing.workspaces import convolution as convolution_scratch
from gpumemnet.tracing.workspaces import layout_copies
from gpumemnet.tracing.workspaces import normalization as normalization_scratch
from gpumemnet.tracing.workspaces import reduction as reduction_scratch
from gpumemnet.tracing.workspaces import sorting as sorting_scratch
from gpumemnet.tracing.workspaces.blas import blas_workspace
from gpumemnet.tracing.workspaces.scratch import Call, Rule, Scratch

__all__ = ["NEGLECTED", "Scratch", "blas_workspace", "scratch", "takes_scratch"]

_RULES: Final[dict[Any, Rule]] = {
    **convolution_scratch.RULES,
    **attention_scratch.RULES,
    **reduction_scratch.RULES,
    **sorting_scratch.RULES,
    **layout_copies.RULES,
    **normalization_scratch.RULES,
}

NEGLECTED: Final[Mapping[str, str]] = {
    "cross-entropy, pooling, upsampling, dropout, cat": "no scratch, or a few bytes",
    "cumulative sums, top-k": "one state per block of threads; the sort of the result is small",
    "foreach and fused optimizers, gradient scaler": "lists of tensors travel as kernel arguments",
    "recurrent cuDNN layers": "cuDNN's workspace for them is not documented",
    "FFT, linear algebra, cuSPARSE": "their libraries' workspaces are not modelled",
    "nonzero, unique, boolean masks": "sizes depend on the data",
    "memory that cuDNN and cuBLAS allocate by themselves": "outside the allocator: it counts as context",
}
"""Sources of scratch memory that are not modelled → the reason."""


def takes_scratch(operator: OpOverload) -> bool:
    """Whether :func:`scratch` has a rule for ``operator``."""
    return operator in _RULES


def scratch(
    operator: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Sequence[Tensor],
    platform: Platform,
) -> tuple[Scratch, ...]:
    """Return the scratch memory that one call of ``operator`` allocates on ``platform``, in order.

    Args:
        operator: the operator, as a dispatch mode below autograd receives it.
        args, kwargs: arguments of the call; only shapes, strides and types matter.
        outputs: the tensors that the call returned.
        platform: the GPU that it runs on.
    """
    rule = _RULES.get(operator)
    if rule is None:
        return ()
    return rule(Call(_named(operator, args, kwargs), outputs, platform))


def _named(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by name; the dispatcher omits those that equal their default, so these
    are added."""
    arguments = schema(operator).arguments
    named = {
        argument.name: argument.default_value
        for argument in arguments[len(args) :]
        if argument.has_default_value()
    }
    named.update(zip((argument.name for argument in arguments), args, strict=False))
    named.update(kwargs)
    return named
