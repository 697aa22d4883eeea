"""The calls of operators that take scratch memory, kept beside a recorded run, so that the scratch
can be computed again.

Only the layouts of tensors are kept: what a rule for scratch memory reads of its arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class TensorLayout(NamedTuple):
    """Shape, strides (both in elements) and element type of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorLayout:
        """Return the layout of ``tensor``."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def tensor(self) -> Tensor:
        """Return a meta tensor with this layout."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True, eq=False)
class OperatorCall:
    """One call of an operator that takes scratch memory.

    Attributes:
        start, end: its events are ``events[start:end]`` of the timeline; the range is empty if it
            allocated nothing.
        operator: name of the operator with its overload, such as ``aten.mm.default``.
        args, kwargs: its arguments, a :class:`TensorLayout` in place of every tensor.
        outputs: the layouts of its outputs.
    """

    start: int
    end: int
    operator: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[TensorLayout, ...]

    @classmethod
    def of(
        cls,
        start: int,
        end: int,
        operator: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outputs: Sequence[Tensor],
    ) -> OperatorCall:
        """Return the record of a call."""
        return cls(
            start,
            end,
            str(operator),
            tuple(map(_layouts, args)),
            {name: _layouts(value) for name, value in kwargs.items()},
            tuple(map(TensorLayout.of, outputs)),
        )


def _layouts(value: Any) -> Any:
    if isinstance(value, Tensor):
        return TensorLayout.of(value)
    return [_layouts(entry) for entry in value] if isinstance(value, list | tuple) else value
