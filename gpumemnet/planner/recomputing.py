"""Runs a unit so that its forward pass runs again in the backward pass: ``torch.utils.checkpoint``
without re-entering autograd.

The statistics of normalization layers must be updated once.  While a forward pass is repeated, such
layers update copies. With :data:`~gpumemnet.planner.decisions.Decision.RECOMPUTE_CHEAP` the results
of expensive operators are kept (selective activation checkpointing, Korthikanti et al., arXiv
2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, Final

from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from gpumemnet.planner.decisions import EXPENSIVE_OPERATORS
from gpumemnet.torch_private.modules import own_buffers
from gpumemnet.torch_private.operators import operator_name, schema

_selective_contexts: Any = create_selective_checkpoint_contexts  # without types
NORMALIZATIONS: Final = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
"""Layers whose running statistics change in the forward pass."""


def recompute(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    cheap: bool,
) -> Any:
    """Return ``forward(*args, **kwargs)``, which runs again in the backward pass.

    Args:
        module: the unit.
        forward: its forward pass.
        args, kwargs: its arguments.
        cheap: whether the results of :data:`~gpumemnet.planner.decisions.EXPENSIVE_OPERATORS` are
            kept.
    """
    names = tuple(kwargs)

    def run(*values: Any) -> Any:
        at = len(values) - len(names)
        return forward(*values[:at], **dict(zip(names, values[at:], strict=True)))

    # A checkpoint saves positional arguments as autograd saves tensors, so that they can be
    # swapped; it keeps the others.
    return checkpoint(
        run,
        *args,
        *kwargs.values(),
        use_reentrant=False,
        context_fn=lambda: _contexts(module, cheap),
    )


def _contexts(
    module: nn.Module, cheap: bool
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the forward pass and of its repetition."""
    first, again = _selective_contexts(_policy) if cheap else (nullcontext(), nullcontext())
    norms: list[nn.Module] = [each for each in module.modules() if isinstance(each, NORMALIZATIONS)]
    return first, _Repetition(norms, again) if norms else again


class _Repetition:
    """Context in which normalization layers update copies of their statistics; it may be entered
    again.

    Args:
        norms: the layers.
        inner: a context that is entered last.
    """

    def __init__(self, norms: list[nn.Module], inner: AbstractContextManager[Any]) -> None:
        self._norms = norms
        self._inner = inner
        self._originals: list[tuple[dict[str, Tensor | None], str, Tensor]] = []

    def __enter__(self) -> None:
        for module in self._norms:
            buffers = own_buffers(module)
            for name, buffer in list(buffers.items()):
                if buffer is not None:
                    self._originals.append((buffers, name, buffer))
                    buffers[name] = buffer.clone()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            while self._originals:
                buffers, name, buffer = self._originals.pop()
                buffers[name] = buffer


def _policy(context: object, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if keeps_results(operator, args, kwargs)
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


def keeps_results(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the results of a call are kept when cheap operators are recomputed.

    They are those of expensive operators that draw no random numbers: a repetition must draw all
    numbers again.
    """
    if operator_name(operator) not in EXPENSIVE_OPERATORS:
        return False
    at = _dropout_argument(operator)
    return not kwargs.get("dropout_p", args[at] if at is not None and at < len(args) else 0.0)


@cache
def _dropout_argument(operator: Any) -> int | None:
    names = [argument.name for argument in schema(operator).arguments]
    return names.index("dropout_p") if "dropout_p" in names else None
