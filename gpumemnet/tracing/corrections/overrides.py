"""Replaces kernels of operators on meta tensors ahead of autograd, so that autograd saves what it
would save on CUDA.

The kernels are registered with PyTorch's dispatcher under the autograd key of meta tensors.  They
run for calls from Python and from C++, also inside ``multi_head_attention_forward``, and only for
meta tensors.  The operator's own kernel is reached through the autograd key that no device uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpumemnet.torch_private.operators import overriding_kernels

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
