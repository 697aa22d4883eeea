"""A simulation of PyTorch's CUDA caching allocator: computes reserved memory from allocations and
releases."""

from gpumemnet.allocator.caching_allocator import CachingAllocator, OutOfMemory
from gpumemnet.allocator.limit import smallest_limit
from gpumemnet.allocator.loops import EMPTY_CACHE
from gpumemnet.allocator.replay import Replay, replay
from gpumemnet.allocator.report import Segment, SegmentBlock, Statistics
from gpumemnet.allocator.settings import DEFAULT_SETTINGS, AllocatorSettings, parse_settings
from gpumemnet.allocator.sizes import round_size, segment_size

__all__ = [
    "AllocatorSettings",
    "CachingAllocator",
    "DEFAULT_SETTINGS",
    "EMPTY_CACHE",
    "OutOfMemory",
    "Replay",
    "Segment",
    "SegmentBlock",
    "Statistics",
    "parse_settings",
    "replay",
    "round_size",
    "segment_size",
    "smallest_limit",
]
