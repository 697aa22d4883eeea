"""The expected workspace of a convolution's operations.

PyTorch allocates the workspace of the plan that cuDNN's heuristics rank first
(``aten/src/ATen/native/cudnn/Conv_v8.cpp``), and frees it after the call.  With
``torch.backends.cudnn.benchmark`` it first allocates the largest workspace of all plans, halved
while it does not fit, times the plans, frees it and empties the allocator's cache.

cuDNN itself can say what it takes, see :mod:`gpumemnet.tracing.workspaces.cudnn_plans`.  The rules
here are for machines without it.  What is copied is learned from answers of cuDNN 9.8 and 9.28
(:mod:`gpumemnet.tracing.workspaces.copied_tensors`); in fp32, from published readings too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from gpumemnet.cudnn.execution_plans import BACKWARD_FILTER
from gpumemnet.physics.element_types import TF32_SMALLEST_CHANNELS
from gpumemnet.tracing.platform import Platform
from gpumemnet.tracing.workspaces.copied_tensors import copied_bytes
from gpumemnet.tracing.workspaces.cudnn_convolution import Convolution

TF32_CAPABILITY: Final = (8, 0)
"""First compute capability whose tensor cores run fp32 convolutions, in TF32."""
SEARCH_COPIES: Final = 1.5
"""Largest workspace that a search tries, by the bytes of image, result and weight.  Of 4,400
convolutions of real networks, the median is 1.0 (H100) to 1.5 (A100, Ada) in fp32 and 1.0 to 2.1 in
fp16; the 95th percentile is 2.2 to 5."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Workspace bytes of one operation.

    Attributes:
        expected_bytes: that of the plan that PyTorch is expected to run.
        bound_bytes: the largest of the plans that may run instead.
        search_bytes: the largest that a search tries.
    """

    expected_bytes: int
    bound_bytes: int
    search_bytes: int


def workspace(convolution: Convolution, operation: str, platform: Platform) -> Workspace:
    """Return the workspace of one operation by rules."""
    all_bytes = sum(convolution.tensor_bytes)
    expected = _expected_bytes(convolution, operation, platform)
    bound = max(expected, all_bytes)
    return Workspace(expected, bound, max(bound, round(SEARCH_COPIES * all_bytes)))


def _expected_bytes(convolution: Convolution, operation: str, platform: Platform) -> int:
    """Return the workspace of the plan that is expected to run.

    fp32 convolutions copy tensors only for the gradient of filters larger than 1 x 1, and there all
    three if tensor cores run on channels first.  The patches of a vision transformer take no
    workspace.  Published readings say so: of an A100, with a search and without, and of two GeForce
        cards (``docs/accuracy/convolution-workspaces.md``).  Answers of cuDNN 9.8 and 9.28 copy
        more.
    """
    if not _is_learned(convolution, platform):
        return 0
    if convolution.dtype == torch.float32:
        if not keeps_workspace(convolution, operation) or _embeds_patches(convolution):
            return 0
        if _runs_on_tensor_cores(convolution, platform) and not convolution.channels_last:
            return sum(convolution.tensor_bytes)
    return copied_bytes(convolution, operation, platform.compute_capability)


def _embeds_patches(convolution: Convolution) -> bool:
    """Whether the filter takes an image of few channels apart into patches that do not overlap."""
    return convolution.stride == convolution.filter and not _is_wide(convolution)


def _runs_on_tensor_cores(convolution: Convolution, platform: Platform) -> bool:
    """Whether an fp32 convolution runs in TF32."""
    return platform.compute_capability >= TF32_CAPABILITY and _is_wide(convolution)


def _is_wide(convolution: Convolution) -> bool:
    """Whether a group has the channels that tensor cores read at once in fp32."""
    return (
        min(convolution.channels, convolution.outputs) // convolution.groups
        >= TF32_SMALLEST_CHANNELS
    )


def keeps_workspace(convolution: Convolution, operation: str) -> bool:
    """Whether an fp32 convolution keeps a workspace: for the gradient of filters larger than 1 x 1,
    by published readings."""
    return operation == BACKWARD_FILTER and max(convolution.filter) > 1


def _is_learned(convolution: Convolution, platform: Platform) -> bool:
    """Whether answers for such convolutions were learned from; the others are expected to need no
    workspace.

    fp16 stands for bf16, which older GPUs convert without cuDNN's tensor cores; fp32 was asked for
    with TF32 allowed.
    """
    if convolution.dtype == torch.float32:
        return platform.tf32
    return convolution.dtype == torch.float16 or (
        convolution.dtype == torch.bfloat16 and platform.compute_capability >= (8, 0)
    )
