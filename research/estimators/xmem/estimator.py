"""xMem's analyzer and orchestrator: which blocks of a CPU run a GPU would hold, and their
replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from torch import nn

from gpumemnet.allocator import OutOfMemory, replay

from ..estimator import PublishedEstimator, Subject
from .profiled_run import Block, run_on_cpu

_KEPT_WHOLE: Final = ("loss", "batch")


def kept_blocks(blocks: Sequence[Block], parameter_sizes: Sequence[int]) -> list[Block]:
    """The blocks that are replayed.

    Blocks of layers and backward operators must outlive them; those of the loss and the batch are
    all kept; those of the optimizer must be as large as a parameter.

    Args:
        blocks: of the run.
        parameter_sizes: bytes of each parameter.
    """
    sizes = set(parameter_sizes)
    return [
        block
        for block in blocks
        if block.place in _KEPT_WHOLE
        or (block.place == "optimizer" and block.size_bytes in sizes)
        or (block.place in ("layer", "operator", "backward") and block.end > block.place_end)
    ]


def stream(blocks: Sequence[Block], parameter_sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Allocations and frees, and the bytes of each storage: parameters first, which stay, then the
    blocks in their order."""
    sizes = [*parameter_sizes, *(block.size_bytes for block in blocks)]
    first = len(parameter_sizes)
    moments = [(block.start, 1, first + index) for index, block in enumerate(blocks)]
    moments += [
        (block.end, 0, ~(first + index))
        for index, block in enumerate(blocks)
        if block.end != float("inf")
    ]
    return [*range(first), *(event for _, _, event in sorted(moments))], sizes


def parts(subject: Subject) -> Mapping[str, int]:
    """Reserved bytes of the replayed run, and the context.

    Raises:
        NotCoveredError: the model does not run on the CPU.
    """
    training = subject.training()
    sizes = parameter_sizes(training.network)
    events, bytes_of = stream(kept_blocks(run_on_cpu(training), sizes), sizes)
    capacity = max(subject.gpu.capacity_bytes - subject.context_bytes, 0)
    try:
        run = replay(events, bytes_of, capacity_bytes=capacity)
    except OutOfMemory:
        run = replay(events, bytes_of)
    return {"reserved": run.peak_reserved_bytes, "context": subject.context_bytes}


def parameter_sizes(network: nn.Module) -> list[int]:
    """Bytes of each parameter, shared ones once."""
    return [parameter.numel() * parameter.element_size() for parameter in network.parameters()]


XMEM: Final = PublishedEstimator(
    name="xMem",
    needs="cpu run",
    leaves_out="workspaces of CUDA libraries; kernels that keep other tensors on a GPU than on a CPU",
    source="Shi et al., Middleware 2025, arXiv 2510.21048",
    parts=parts,
)
