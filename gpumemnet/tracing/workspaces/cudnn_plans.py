"""Workspaces of the plans that cuDNN itself lists for a convolution, see :mod:`gpumemnet.cudnn`.

PyTorch runs the first plan of the heuristics that works, then those of the fallback list (``Conv_v8.cpp``).  With
``torch.backends.cudnn.benchmark`` it first allocates the largest workspace of all plans that fits, times the plans and keeps the
fastest.  Which one that is cannot be known without the GPU; it is assumed to be the one that the heuristics rank first.
"""

from __future__ import annotations

from typing import Final

from gpumemnet.cudnn.plans import ConvolutionQuestion
from gpumemnet.tracing.platform import Platform
from gpumemnet.tracing.workspaces.cudnn import Convolution, Workspace

_CONTENDERS: Final = 3
"""Number of plans among which the bound is taken: another version of cuDNN orders the first ones differently."""


def planned_workspace(convolution: Convolution, operation: str, platform: Platform) -> Workspace | None:
    """Return the workspace by cuDNN's own plans; ``None`` if cuDNN is not asked or has no answer."""
    if platform.cudnn is None:
        return None
    plans = platform.cudnn.plans(platform.device, _question(convolution, operation))
    if plans is None:
        return None
    dtype = str(convolution.dtype).removeprefix("torch.")
    capacity_bytes = platform.device.capacity_bytes
    sizes = [plan.workspace_bytes for plan in plans.for_pytorch(dtype, platform.tf32) if plan.workspace_bytes <= capacity_bytes]
    return Workspace(sizes[0], max(sizes[:_CONTENDERS]), max(sizes)) if sizes else None


def _question(convolution: Convolution, operation: str) -> ConvolutionQuestion:
    return ConvolutionQuestion(
        operation=operation,
        image=(convolution.batch, convolution.channels, *convolution.image),
        weight=(convolution.outputs, convolution.channels // convolution.groups, *convolution.filter),
        result=(convolution.batch, convolution.outputs, *convolution.result),
        channels_last=convolution.channels_last,
        dtype=str(convolution.dtype).removeprefix("torch."),
        padding=convolution.padding,
        stride=convolution.stride,
        dilation=convolution.dilation,
    )
