"""What the parts of a traced peak are called, and how their amounts are written so that they still add up."""

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
    "temporary": ("temporaries", "what operators need at that moment"),
    "communication": ("communication", "gathered parameters, and buffers that are exchanged with other GPUs"),
    "workspace": ("workspaces", "scratch memory of cuBLAS, cuDNN and kernels"),
    "fragmentation": ("fragmentation", "rounding, and cached blocks that fit nothing"),
    "context": ("CUDA context", "driver, libraries and loaded kernels"),
    "communicator": ("NCCL", "its own buffers, as read elsewhere"),
}
"""For each part of :attr:`gpumemnet.tracing.report.answer.TraceAnswer.parts` its name and what it is, for people."""


def shown_mib(amounts: Sequence[int]) -> list[int]:
    """Whole MiB of ``amounts`` that add up to the whole MiB that hold all of them: the largest remainders are rounded up."""
    floors = [amount // MIB for amount in amounts]
    order = sorted(range(len(amounts)), key=lambda index: -(amounts[index] % MIB))
    for index in order[: ceil_mib(sum(amounts)) - sum(floors)]:
        floors[index] += 1
    return floors
