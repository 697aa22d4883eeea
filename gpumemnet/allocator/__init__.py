"""A simulation of PyTorch's CUDA caching allocator: computes reserved memory from allocations and
releases."""

from gpumemnet.allocator.caching_allocator import CachingAllocator, OutOfMemory
from gpumemnet.allocator.replay import EMPTY_CACHE, Replay, replay, signed_bytes, smallest_limit
from gpumemnet.allocator.settings import (
    DEFAULT_SETTINGS,
    AllocatorSettings,
    parse_settings,
    round_size,
    segment_size,
)

__all__ = [
    "AllocatorSettings",
    "CachingAllocator",
    "DEFAULT_SETTINGS",
    "EMPTY_CACHE",
    "OutOfMemory",
    "Replay",
    "parse_settings",
    "replay",
    "round_size",
    "segment_size",
    "signed_bytes",
    "smallest_limit",
]
