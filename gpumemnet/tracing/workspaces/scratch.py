"""Scratch memory: what the CUDA kernel of an operator allocates from the caching allocator and frees before it returns.

The dispatcher does not show it, so it is computed from the operator's arguments by the rules of PyTorch's CUDA sources.
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

    Several pieces of one operator follow each other: each is freed before the next is allocated, unless it is held.

    Attributes:
        expected_bytes: its most likely size; 0 if only a bound is known.
        bound_bytes: upper bound of its size.
        kind: its purpose: ``convolution``, ``convolution_benchmark``, ``attention``, ``reduction``, ``sort``, ``copy`` …
        held: whether it stays allocated until the operator returns, or until the next output if it comes between two outputs.
        after: number of the operator's new outputs that are allocated before it; ``None`` for all of them.
        once: a value: a thread needs the piece only at the first call with this value, and the allocator's cache is emptied
            (``torch.cuda.empty_cache``) after it is freed; ``None`` for a piece that every call needs.
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
        arguments: values by the names of the operator's schema, defaults included.
        outputs: the tensors that it returned.
        platform: the GPU that it runs on.
    """

    arguments: Mapping[str, Any]
    outputs: Sequence[Tensor]
    platform: Platform


Rule = Callable[[Call], tuple[Scratch, ...]]
"""Returns the scratch memory of an operator's call."""


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
