"""Private names of autograd: which node of the backward graph runs, and whether the engine itself
calls an operator."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any, Final

import torch
import torch.autograd.graph
from torch import Tensor

from gpumemnet.torch_private.names import check, declare
from gpumemnet.torch_private.operators import DispatchMode

ENGINE: Final = declare(
    "torch.autograd.graph:_engine_run_backward",
    "see whether the backward engine itself adds gradients",
)
_NO_TASK: Final = -1


def next_node_number() -> int:
    """The sequence number that the next node of the backward graph gets; it grows with every node
    of this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def running_node_number() -> int | None:
    """The sequence number of the backward node that runs in this thread; ``None`` if none runs."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def backward_runs() -> bool:
    """Whether this thread is in a backward pass, where code runs without the function modes that
    were entered before."""
    return torch._C._current_graph_task_id() != _NO_TASK


def called_by_engine(own_packages: frozenset[str]) -> bool:
    """Whether a backward pass that records no gradients runs, and no Python code called since it
    started.

    Args:
        own_packages: packages of the kernels that ask; their frames are not looked at.
    """
    if torch.is_grad_enabled() or not backward_runs():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__package__") in own_packages:
        frame = frame.f_back
    return frame is not None and frame.f_code is _engine_code()


def _engine_code() -> Any:
    return torch.autograd.graph._engine_run_backward.__code__


def _probe() -> None:
    found: list[tuple[int | None, bool]] = []

    class Mode(DispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found.append((running_node_number(), torch._C._current_graph_task_id() != _NO_TASK))
            return func(*args, **(kwargs or {}))

    leaf = torch.empty(2, device="meta", requires_grad=True)
    number = next_node_number()
    result = leaf.sin()
    check(next_node_number() > number, "sequence numbers do not grow with nodes")
    check(running_node_number() is None, "a node is said to run where none does")
    check(
        torch._C._current_graph_task_id() == _NO_TASK,
        "a backward pass is said to run where none does",
    )
    with Mode():
        torch.autograd.backward(result, torch.empty(2, device="meta"))
    check(
        (number, True) in found,
        f"the nodes of a backward pass are {found}, without the forward pass's {number}",
    )


def _probe_engine() -> None:
    called: list[bool] = []

    class Mode(DispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            frame: FrameType | None = sys._getframe(1)
            codes = set()
            while frame is not None:
                codes.add(frame.f_code)
                frame = frame.f_back
            called.append(_engine_code() in codes)
            return func(*args, **(kwargs or {}))

    leaf = torch.empty(2, device="meta", requires_grad=True)
    with Mode():
        torch.autograd.backward(leaf.sin().sum())
    check(
        not called[0] and called[-1],
        "the engine's function is not found below a backward pass alone",
    )


declare(
    "torch._C:_autograd._get_sequence_nr",
    "know which module made a node of the backward graph",
    probe=_probe,
)
declare("torch._C:_current_autograd_node", "know which node of the backward graph runs")
declare("torch._C:_current_graph_task_id", "see whether a backward pass runs", probe=_probe_engine)


def leaves_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves whose gradients a backward pass from ``outputs`` accumulates."""
    nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen, leaves = set(nodes), []
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            leaves.append(leaf)
        following = [
            later for later, _ in node.next_functions if later is not None and later not in seen
        ]
        seen.update(following)
        nodes += following
    return leaves
