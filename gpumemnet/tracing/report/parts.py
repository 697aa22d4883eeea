"""Names of the parts of a traced peak, and rounding of amounts to whole MiB that preserves their
sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gpumemnet.units import MIB, ceil_mib

PART_NAMES: Final[Mapping[str, tuple[str, str]]] = {
    "parameter": ("parameters", "the weights"),
    "buffer": ("buffers", "running statistics and tables"),
    "gradient": ("gradients", "of the trainable parameters"),
    "optimizer_state": ("optimizer state", "what the optimizer keeps for each parameter"),
    "saved_activation": ("saved activations", "what the forward pass keeps for the backward pass"),
    "input": ("inputs", "the batch and its targets"),
    "temporary": ("temporaries", "what operators need at the peak"),
    "communication": (
        "communication",
        "gathered parameters, and buffers for exchange with other GPUs",
    ),
    "workspace": ("workspaces", "scratch memory of cuBLAS, cuDNN and kernels"),
    "fragmentation": ("fragmentation", "rounding, and cached blocks that no request fits into"),
    "context": ("CUDA context", "driver, libraries and loaded kernels"),
    "communicator": ("NCCL", "its own buffers, from published readings"),
}
"""Part of :attr:`gpumemnet.tracing.report.answer.TraceAnswer.parts` → its name and its meaning."""

TOP_MODULES: Final = 10
"""How many of the modules that hold most at the peak a report names."""


def shown_mib(amounts: Sequence[int]) -> list[int]:
    """Round ``amounts`` in bytes to whole MiB that add up to the rounded-up total: the largest
    remainders are rounded up."""
    floors = [amount // MIB for amount in amounts]
    order = sorted(range(len(amounts)), key=lambda index: -(amounts[index] % MIB))
    for index in order[: ceil_mib(sum(amounts)) - sum(floors)]:
        floors[index] += 1
    return floors
