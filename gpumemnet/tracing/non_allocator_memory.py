"""What a training process holds on its GPU outside of the caching allocator: the CUDA context, and NCCL's buffers."""

from __future__ import annotations

from collections.abc import Sequence

from gpumemnet.gpu.catalogue import ContextEstimate, DeviceProfile, context
from gpumemnet.physics.nccl import SOURCE, communicator_bound_bytes, communicator_bytes


def non_allocator_memory(device: DeviceProfile, groups: Sequence[int]) -> ContextEstimate:
    """Context and communicators of a process that exchanges in ``groups``, on a ``device`` of its own."""
    alone, bound_bytes = context(device), communicator_bound_bytes(groups)
    if not bound_bytes:
        return alone
    return ContextEstimate(
        alone.expected_bytes + communicator_bytes(groups), alone.bound_bytes + bound_bytes, f"{alone.source}; {SOURCE}"
    )
