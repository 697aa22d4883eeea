"""Scratch memory: what the CUDA implementation of one operator takes from the caching allocator and gives back before it returns.

No dispatcher shows it, so it is derived from the operator's arguments by the rules of PyTorch's CUDA sources.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gpumemnet.tracing.platform import Platform


@dataclass(frozen=True, slots=True)
class Scratch:
    """One piece of scratch memory.

    Several pieces of one operator come one after the other: each is freed before the next is asked for, unless it is held.

    Attributes:
        expected_bytes: what it takes most likely; 0 for a piece that only a bound knows of.
        bound_bytes: the most that it may take.
        kind: what it is for: ``convolution``, ``convolution_benchmark``, ``attention``, ``reduction``, ``sort``, ``copy`` …
        held: whether it stays beside the pieces that follow: until the operator returns, or, where it comes between two of its
            outputs, until the second of them.
        after: how many of the operator's new outputs are there before it; ``None`` for all of them.
        once: the piece is needed only when a thread meets this value for the first time, and the allocator's cache is emptied
            (``torch.cuda.empty_cache``) as soon as it has been freed; ``None`` for a piece that every call needs.
    """

    expected_bytes: int
    bound_bytes: int
    kind: str
    held: bool = False
    after: int | None = None
    once: Hashable | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator.

    Attributes:
        arguments: by the names of the operator's schema, defaults included.
        outputs: the tensors that it returned.
        platform: what it runs on.
    """

    arguments: Mapping[str, Any]
    outputs: Sequence[Tensor]
    platform: Platform


Rule = Callable[[Call], tuple[Scratch, ...]]
"""The scratch memory of an operator's call."""


def exactly(amount_bytes: int, kind: str, *, held: bool = False, after: int | None = None) -> tuple[Scratch, ...]:
    """A piece whose size is known for certain; nothing where it is empty."""
    return (Scratch(amount_bytes, amount_bytes, kind, held, after),) if amount_bytes else ()


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a dense copy of ``tensor``."""
    return tensor.numel() * tensor.element_size()


def ceil_div(dividend: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-dividend // divisor)


def round_up(amount: int, multiple: int) -> int:
    """The next multiple of ``multiple``."""
    return ceil_div(amount, multiple) * multiple
