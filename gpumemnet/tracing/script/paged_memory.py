"""Paged optimizers of bitsandbytes: their state is in CUDA's managed memory, which the driver moves
between GPU and host.

The trace counts it as on the GPU, where it is while there is room.  bitsandbytes takes it from its
CUDA library, which is not loaded here (``get_paged`` and ``fill`` in
``bitsandbytes/functional.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def take_from_gpu(optimizer: Optimizer, note: Callable[[str], object]) -> None:
    """Let a paged optimizer allocate its state on the simulated GPU; does nothing for others.

    Args:
        optimizer: about to take a step.
        note: called with a note for a paged optimizer.
    """
    functional: Any = sys.modules.get("bitsandbytes.functional")
    if functional is None or not getattr(optimizer, "is_paged", False):
        return

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device or "cuda")

    def fill(tensor: Tensor, value: Any, device: Any = None, prefetch: bool = True) -> None:
        tensor.fill_(value)

    functional.get_paged, functional.fill = get_paged, fill
    note(
        "paged optimizer: its state is counted as on the GPU; the driver moves parts of it to the host where memory is short"
    )
