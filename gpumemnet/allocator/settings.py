"""The sizes that PyTorch uses for a request, and the options of ``PYTORCH_CUDA_ALLOC_CONF`` that
change them.

Constants and rules of sizes are those of ``c10/core/AllocatorConfig.h`` and
``c10/cuda/CUDACachingAllocator.cpp`` (``round_size``, ``roundup_power2_next_division``,
``get_allocation_size``).  Options, defaults and bounds are those of ``c10/core/AllocatorConfig``
and ``c10/cuda/CUDAAllocatorConfig`` in PyTorch 2.13.  PyTorch reads ``PYTORCH_CUDA_ALLOC_CONF``,
and ``PYTORCH_ALLOC_CONF`` only if that is not set.  Its "MB" are MiB.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.units import MIB

MINIMUM_BLOCK_BYTES: Final = 512
SMALL_BYTES: Final = MIB
"""Largest rounded size that is served from the small pool."""
SMALL_SEGMENT_BYTES: Final = 2 * MIB
MINIMUM_LARGE_BYTES: Final = 10 * MIB
"""Requests of at least this size get a segment of their own size."""
LARGE_SEGMENT_BYTES: Final = 20 * MIB
SEGMENT_ROUNDING_BYTES: Final = 2 * MIB


def round_size(size_bytes: int, divisions: Sequence[int]) -> int:
    """Return the block size for ``size_bytes``, at least 1, without slack of the block that is
    found.

    Args:
        size_bytes: bytes of a tensor's storage.
        divisions: ``AllocatorSettings.roundup_power2_divisions``.
    """
    if size_bytes < MINIMUM_BLOCK_BYTES:
        return MINIMUM_BLOCK_BYTES
    parts = divisions[
        min(max(size_bytes.bit_length() - SMALL_BYTES.bit_length(), 0), len(divisions) - 1)
    ]
    if parts > 1 and size_bytes > MINIMUM_BLOCK_BYTES * parts:
        step = (1 << size_bytes.bit_length() - 1) // parts
        return -(-size_bytes // step) * step
    return -(-size_bytes // MINIMUM_BLOCK_BYTES) * MINIMUM_BLOCK_BYTES


def segment_size(block_bytes: int, large_segment_bytes: int = LARGE_SEGMENT_BYTES) -> int:
    """Return the segment size for a block of ``block_bytes``, a rounded size."""
    if block_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block_bytes < MINIMUM_LARGE_BYTES:
        return large_segment_bytes
    return -(-block_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES


DIVISION_INTERVALS: Final = 16
"""Number of size intervals of ``roundup_power2_divisions``: below 2 MiB, 2–4 MiB, …, from 32
GiB."""

NEUTRAL_OPTIONS: Final = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
    }
)
"""Options of PyTorch that change neither sizes nor segments on the GPU (host memory, locks, graph
capture)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Settings of the caching allocator; the defaults are PyTorch's.

    Attributes:
        expandable_segments: whether one segment per stream and pool grows, instead of many
            segments.
        max_split_bytes: blocks of this size and larger are never split; ``None`` for no limit.
        max_non_split_rounding_bytes: how much larger than the request a block may be that must not
            be split; ``None`` for ``large_segment_bytes``.
        roundup_power2_divisions: for each of the 16 intervals of sizes, into how many parts the
            room between two powers of two is divided when a size is rounded up; 0 or 1 for
            multiples of 512 bytes.
        garbage_collection_threshold: fraction of the allowed memory above which old cached segments
            are released before a new one is made; 0 for never.  PyTorch uses it only if
            ``per_process_memory_fraction`` is below 1.
        large_segment_bytes: segment for requests above 1 MiB and below 10 MiB, and the page of
            large expandable segments.
        per_process_memory_fraction: fraction of the device's memory that the allocator may reserve.
        throw_on_cudamalloc_oom: whether to fail at once if that fraction would be exceeded, without
            releasing the cache first.

    Raises:
        InvalidRequestError: PyTorch rejects the value; the field is the name of its option.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int | None = None
    roundup_power2_divisions: tuple[int, ...] = (0,) * DIVISION_INTERVALS
    garbage_collection_threshold: float = 0.0
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    per_process_memory_fraction: float = 1.0
    throw_on_cudamalloc_oom: bool = False

    def __post_init__(self) -> None:
        if self.large_segment_bytes <= MINIMUM_LARGE_BYTES:
            raise InvalidRequestError(
                f"must be above {MINIMUM_LARGE_BYTES // MIB}", "large_segment_size_mb"
            )
        for option, limit in (
            ("max_split_size_mb", self.max_split_bytes),
            ("max_non_split_rounding_mb", self.max_non_split_rounding_bytes),
        ):
            if limit is not None and limit < self.large_segment_bytes:
                least = self.large_segment_bytes / MIB
                raise InvalidRequestError(
                    f"must be at least {least:g}, the size of a large segment", option
                )
        if not 0 <= self.garbage_collection_threshold < 1:
            raise InvalidRequestError(
                "must lie above 0 and below 1", "garbage_collection_threshold"
            )
        if not 0 <= self.per_process_memory_fraction <= 1:
            raise InvalidRequestError("must lie between 0 and 1", "per_process_memory_fraction")
        divisions = self.roundup_power2_divisions
        if len(divisions) != DIVISION_INTERVALS or any(n < 0 or n & (n - 1) for n in divisions):
            reason = f"must be {DIVISION_INTERVALS} numbers, each 0 or a power of two"
            raise InvalidRequestError(reason, "roundup_power2_divisions")


DEFAULT_SETTINGS: Final = AllocatorSettings()

_OPTION: Final = re.compile(r"([^:,\[\]]*):(\[[^\[\]]*\]|[^:,\[\]]+)(?:,|$)")
_INTEGER: Final = re.compile(r"\d+", re.ASCII)
_DECIMAL: Final = re.compile(r"\d+\.?\d*|\.\d+", re.ASCII)


def parse_settings(text: str) -> AllocatorSettings:
    """Return the settings of a text such as
    ``max_split_size_mb:128,roundup_power2_divisions:[256:4,>:1]``.

    Raises:
        InvalidRequestError: an option is unknown, has another form than ``name:value``, or has a
            value that PyTorch rejects.
    """
    bare = "".join(text.split())  # PyTorch ignores all white space
    values: dict[str, Any] = {}
    position = 0
    while position < len(bare):
        found = _OPTION.match(bare, position)
        if found is None:
            rest = describe(bare[position:])
            raise InvalidRequestError(
                f"{rest} is not of the form option:value,option:value", "allocator settings"
            )
        option, value = found.groups()
        if option in _READERS:
            attribute, read = _READERS[option]
            values[attribute] = read(option, value)
        elif option == "backend":
            if value != "native":
                raise InvalidRequestError(
                    "only PyTorch's native allocator can be simulated: leave it out", "backend"
                )
        elif option not in NEUTRAL_OPTIONS:
            known = ", ".join(sorted({*_READERS, "backend", *NEUTRAL_OPTIONS}))
            raise InvalidRequestError(
                f"{describe(option)} is no option of PyTorch's; these are: {known}",
                "allocator settings",
            )
        position = found.end()
    return AllocatorSettings(**values)


def settings_text(settings: AllocatorSettings) -> str:
    """Return the text that :func:`parse_settings` reads as ``settings``; empty for the defaults."""
    parts = []
    for option, (attribute, read) in _READERS.items():
        value = getattr(settings, attribute)
        if value == getattr(DEFAULT_SETTINGS, attribute):
            continue
        if read is _mebibytes:
            value = -(-value // MIB)
        elif read is _divisions:
            value = (
                "["
                + ",".join(f"{2**interval}:{number}" for interval, number in enumerate(value))
                + "]"
            )
        parts.append(f"{option}:{value}")
    return ",".join(parts)


def _flag(option: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise InvalidRequestError(f"must be True or False, not {describe(value)}", option)
    return value == "True"


def _integer(option: str, value: str) -> int:
    if not _INTEGER.fullmatch(value):
        raise InvalidRequestError(f"must be a whole number, not {describe(value)}", option)
    return int(value)


def _mebibytes(option: str, value: str) -> int:
    return _integer(option, value) * MIB


def _decimal(option: str, value: str) -> float:
    if not _DECIMAL.fullmatch(value):
        raise InvalidRequestError(f"must be a number, not {describe(value)}", option)
    return float(value)


def _threshold(option: str, value: str) -> float:
    threshold = _decimal(option, value)
    if threshold == 0:  # 0 is the default, but PyTorch rejects it in the text
        raise InvalidRequestError("must lie above 0 and below 1", option)
    return threshold


def _divisions(option: str, value: str) -> tuple[int, ...]:
    """Parse one number for all intervals, or ``[bound:number,…,>:number]`` with bounds in MiB."""
    if not value.startswith("["):
        number = _power_of_two(option, value)
        return (number,) * DIVISION_INTERVALS
    table = [0] * DIVISION_INTERVALS
    last = 0
    first = True
    for part in filter(None, value[1:-1].split(",")):
        bound, _, written = part.partition(":")
        number = 0 if written == "0" else _power_of_two(option, written)
        if bound == ">":
            table[last + 1 :] = [number] * (DIVISION_INTERVALS - last - 1)
            continue
        last = min(_power_of_two(option, bound).bit_length() - 1, DIVISION_INTERVALS - 1)
        if first:  # the smallest bound also covers all smaller sizes
            table[:last] = [number] * last
            first = False
        table[last] = number
    return tuple(table)


def _power_of_two(option: str, value: str) -> int:
    number = _integer(option, value)
    if number == 0 or number & (number - 1):
        raise InvalidRequestError(f"must be made of powers of two, not {describe(value)}", option)
    return number


_READERS: Final[dict[str, tuple[str, Callable[[str, str], Any]]]] = {
    "expandable_segments": ("expandable_segments", _flag),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "large_segment_size_mb": ("large_segment_bytes", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mebibytes),
    "max_split_size_mb": ("max_split_bytes", _mebibytes),
    "per_process_memory_fraction": ("per_process_memory_fraction", _decimal),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "throw_on_cudamalloc_oom": ("throw_on_cudamalloc_oom", _flag),
}
"""Option, the attribute of :class:`AllocatorSettings` that it sets, and how its value is read."""
