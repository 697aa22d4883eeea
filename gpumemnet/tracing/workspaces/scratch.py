"""Scratch memory: the CUDA code of an operator allocates it from the caching allocator and frees it
before it returns.

It is not visible to the dispatcher.  So rules from PyTorch's CUDA sources compute it from the
operator's arguments.
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

    An operator may allocate several pieces in turn.  Each is freed before the next is allocated,
    unless it is held.

    Attributes:
        expected_bytes: its most likely size; 0 if only a bound is known.
        bound_bytes: upper bound of its size.
        kind: its purpose: ``attention``, ``reduction``, ``sort``, ``copy`` …, or one of those of
            convolutions in :mod:`gpumemnet.tracing.timeline`.
        held: whether it stays allocated until the operator returns, or until the next output if it
            comes between two outputs.
        after: number of the operator's new outputs that are allocated before it; ``None`` for all
            of them.
        once: key of a piece that a thread needs only at the first call with this key; ``None`` for
            a piece that every call needs.  After such a piece is freed, the allocator's cache is
            emptied (``torch.cuda.empty_cache``).
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


def exactly(
    amount_bytes: int, kind: str, *, held: bool = False, after: int | None = None
) -> tuple[Scratch, ...]:
    """Return one piece whose exact size is known, or nothing if it has no bytes."""
    return (Scratch(amount_bytes, amount_bytes, kind, held, after),) if amount_bytes else ()


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a dense copy of ``tensor``."""
    return tensor.numel() * tensor.element_size()


def ceil_div(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-dividend // divisor)


def round_up(amount: int, multiple: int) -> int:
    """Return ``amount``, rounded up to a multiple of ``multiple``."""
    return ceil_div(amount, multiple) * multiple
