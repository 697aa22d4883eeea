"""What a rule of an operator is: a kernel that replaces its own on meta tensors, or the scratch
memory that it takes on CUDA.

Replacing kernels (:class:`Override`) are registered with PyTorch's dispatcher under the autograd
key of meta tensors, ahead of autograd, so that autograd saves what it would save on CUDA.  They run
for calls from Python and from C++, also inside ``multi_head_attention_forward``, and only for meta
tensors.  The operator's own kernel is reached through the autograd key that no device uses.

Scratch memory (:class:`Scratch`) is what the CUDA code of an operator allocates from the caching
allocator and frees before it returns.  It is not visible to the dispatcher.  So rules from
PyTorch's CUDA sources compute it from the operator's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from gpumemnet.torch_private.operators import overriding_kernels
from gpumemnet.tracing.options import Platform

Operator = Any
"""An ``OpOverload`` such as ``torch.ops.aten.dropout.default``."""

Kernel = Callable[..., Any]
"""Called as ``kernel(original, *args, **kwargs)``; ``original(*args, **kwargs)`` is the operator
without this override."""


@dataclass(frozen=True, slots=True)
class Override:
    """One operator's kernel.

    Attributes:
        operator: the ``OpOverload``.
        kernel: the kernel that runs instead.
    """

    operator: Operator
    kernel: Kernel


@contextmanager
def overriding(overrides: Sequence[Override]) -> Iterator[None]:
    """Context in which the kernels run; of several for one operator, each sees the next one as the
    original."""
    by_operator: dict[Operator, list[Kernel]] = {}
    for override in overrides:
        by_operator.setdefault(override.operator, []).append(override.kernel)
    with overriding_kernels(
        {operator: _chained(kernels) for operator, kernels in by_operator.items()}
    ):
        yield


def _chained(kernels: Sequence[Kernel]) -> Kernel:
    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = original
        for kernel in reversed(kernels):
            call = partial(kernel, call)
        return call(*args, **kwargs)

    return run


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
