"""Workspaces of the plans that cuDNN itself lists for a convolution, see :mod:`gpumemnet.cudnn`.

PyTorch runs the first plan of the heuristics that works, then those of the fallback list
(``Conv_v8.cpp``).  With ``torch.backends.cudnn.benchmark`` it first allocates the largest workspace
of all plans that fits, times the plans and keeps the fastest.  Which one that is cannot be known
without the GPU.  It is assumed to be the one that the heuristics rank first where published
readings show a workspace (:func:`~gpumemnet.tracing.workspaces.cudnn.keeps_workspace`), and
otherwise, of the first few, the one that takes least.
"""

from __future__ import annotations

from typing import Final

from gpumemnet.cudnn.execution_plans import ConvolutionQuestion
from gpumemnet.tracing.platform import Platform
from gpumemnet.tracing.workspaces.cudnn import Workspace, keeps_workspace
from gpumemnet.tracing.workspaces.cudnn_convolution import Convolution

_CONTENDERS: Final = 3
"""Number of plans among which the bound is taken, and the plan after a search: versions of cuDNN
order them differently."""


def planned_workspace(
    convolution: Convolution, operation: str, platform: Platform
) -> Workspace | None:
    """Return the workspace by cuDNN's own plans; ``None`` if cuDNN is not asked or has no
    answer."""
    if platform.cudnn is None:
        return None
    plans = platform.cudnn.plans(platform.device, _question(convolution, operation))
    if plans is None:
        return None
    dtype = str(convolution.dtype).removeprefix("torch.")
    capacity_bytes = platform.device.capacity_bytes
    sizes = [
        plan.workspace_bytes
        for plan in plans.for_pytorch(dtype, platform.tf32)
        if plan.workspace_bytes <= capacity_bytes
    ]
    if not sizes:
        return None
    contenders = sizes[:_CONTENDERS]
    takes_least = platform.cudnn_benchmark and not keeps_workspace(convolution, operation)
    return Workspace(min(contenders) if takes_least else sizes[0], max(contenders), max(sizes))


def _question(convolution: Convolution, operation: str) -> ConvolutionQuestion:
    return ConvolutionQuestion(
        operation=operation,
        image=(convolution.batch, convolution.channels, *convolution.image),
        weight=(
            convolution.outputs,
            convolution.channels // convolution.groups,
            *convolution.filter,
        ),
        result=(convolution.batch, convolution.outputs, *convolution.result),
        channels_last=convolution.channels_last,
        dtype=str(convolution.dtype).removeprefix("torch."),
        padding=convolution.padding,
        stride=convolution.stride,
        dilation=convolution.dilation,
    )
