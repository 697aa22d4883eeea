"""The GPU memory of a training process outside the caching allocator: the CUDA context and the buffers of NCCL."""

from __future__ import annotations

from collections.abc import Sequence

from gpumemnet.gpu.catalogue import ContextEstimate, DeviceProfile, context
from gpumemnet.physics.nccl import SOURCE, communicator_bound_bytes, communicator_bytes


def non_allocator_memory(device: DeviceProfile, groups: Sequence[int]) -> ContextEstimate:
    """Return the context and communicators of a process on its own ``device``.

    Args:
        device: profile of the GPU.
        groups: number of ranks in each process group that the process communicates in.
    """
    alone, bound_bytes = context(device), communicator_bound_bytes(groups)
    if not bound_bytes:
        return alone
    return ContextEstimate(
        alone.expected_bytes + communicator_bytes(groups), alone.bound_bytes + bound_bytes, f"{alone.source}; {SOURCE}"
    )
