"""The expected workspace of a convolution's operations.

PyTorch allocates the workspace of the plan that cuDNN's heuristics rank first (``aten/src/ATen/native/cudnn/Conv_v8.cpp``), and
frees it after the call.  With ``torch.backends.cudnn.benchmark`` it first allocates the largest workspace of all plans, halved
while it does not fit, times the plans, frees it and empties the allocator's cache.

cuDNN itself can say what it takes, see :mod:`gpumemnet.tracing.workspaces.cudnn_plans`.  The rules here are for machines without
it: what is copied is learnt from answers of cuDNN 9.8 and 9.28 (:mod:`gpumemnet.tracing.workspaces.copied_tensors`), and, in fp32
and after a search, from published readings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from gpumemnet.cudnn.plans import BACKWARD_FILTER
from gpumemnet.physics.memory_layouts import TF32_SMALLEST_CHANNELS
from gpumemnet.tracing.platform import Platform
from gpumemnet.tracing.workspaces.copied_tensors import copied_bytes
from gpumemnet.tracing.workspaces.cudnn_convolution import Convolution

WITHOUT_FORWARD_COPIES: Final = (8, 0)
"""Compute capability on which fp32 convolutions are expected to copy tensors only for the gradient of filters larger than 1 x 1,
and there all three if tensor cores run on channels first.  Published readings of an A100 say so, with a search and without
(``docs/accuracy/convolution-workspaces.md``); answers of cuDNN 9.8 and 9.28 copy more.  No other GPU's readings were compared,
so elsewhere this holds after a search only."""
SEARCH_COPIES: Final = 1.5
"""Largest workspace that a search tries, by the bytes of image, result and weight.  Of 4,400 convolutions of real networks, the
median is 1.0 (H100) to 1.5 (A100, Ada) in fp32 and 1.0 to 2.1 in fp16; the 95th percentile is 2.2 to 5."""


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
    if not _is_learnt(convolution, platform):
        return 0
    learnt = copied_bytes(convolution, operation, platform.compute_capability)
    if not _copies_for_filters_only(convolution, platform):
        return learnt
    if not keeps_workspace(convolution, operation):
        return 0
    copies_all = _is_wide(convolution) and not convolution.channels_last
    return sum(convolution.tensor_bytes) if copies_all else learnt


def _copies_for_filters_only(convolution: Convolution, platform: Platform) -> bool:
    is_known = platform.compute_capability == WITHOUT_FORWARD_COPIES or platform.cudnn_benchmark
    return is_known and convolution.dtype == torch.float32


def _is_wide(convolution: Convolution) -> bool:
    """Whether a group has the channels that tensor cores read at once in fp32."""
    return min(convolution.channels, convolution.outputs) // convolution.groups >= TF32_SMALLEST_CHANNELS


def keeps_workspace(convolution: Convolution, operation: str) -> bool:
    """Whether the plan that a search keeps takes a workspace: for the gradient of filters larger than 1 x 1, by readings."""
    return operation == BACKWARD_FILTER and max(convolution.filter) > 1


def _is_learnt(convolution: Convolution, platform: Platform) -> bool:
    """Whether answers for such convolutions were learnt from; the others are expected to need no workspace.

    fp16 stands for bf16, which older GPUs convert without cuDNN's tensor cores; fp32 was asked for with TF32 allowed.
    """
    if convolution.dtype == torch.float32:
        return platform.tf32
    return convolution.dtype == torch.float16 or (convolution.dtype == torch.bfloat16 and platform.compute_capability >= (8, 0))
