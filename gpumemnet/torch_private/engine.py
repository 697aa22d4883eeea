"""The order in which PyTorch's engine runs the nodes of a backward graph on a GPU.

Of the nodes that are ready it takes the one that was made last, by a number that each thread counts
for itself (``torch/csrc/autograd/engine.cpp``, ``CompareNodeTaskTime``; ``ATen/SequenceNumber.cpp``).  On a
GPU a thread of the engine runs a backward pass, so what ``create_graph`` makes there has smaller numbers
than in a trace, where one thread does all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Final

import torch

_NUMBER: Final = "gpumemnet_number"


def next_node_number() -> int:
    """The sequence number that the next node of the backward graph gets; it grows with every node
    of this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def running_node_number() -> int | None:
    """The number that the backward node got that runs in this thread; ``None`` if none runs."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node.metadata.get(_NUMBER, node._sequence_nr()))


def backward_runs() -> bool:
    """Whether this thread is in a backward pass, where most code runs without the function modes
    that were entered before; see :func:`~gpumemnet.torch_private.names.seen_within_operators`."""
    return torch._C._current_graph_task_id() != -1


class DeviceThread:
    """Gives nodes the numbers that they have on a GPU, once a script has asked for ``create_graph``."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        """The first numbers that backward passes gave, and those after their last ones, in turn."""
        self._counts = [0]
        """Nodes that the engine's thread had made before each of these."""
        self._creates = False

    def numbered(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return the engine's entry, which numbers the nodes of a graph before it runs them."""

        @wraps(run)
        def numbering(outputs: Iterable[Any], *given: Any, **others: Any) -> Any:
            if backward_runs():
                return run(outputs, *given, **others)
            if self._creates:
                self._number(outputs)
            start = next_node_number()
            try:
                return run(outputs, *given, **others)
            finally:
                if (end := next_node_number()) > start:
                    self._creates |= any(given[2:3])
                    self._starts += start, end
                    self._counts += self._counts[-1], self._counts[-1] + end - start

        return numbering

    def _number(self, outputs: Iterable[Any]) -> None:
        nodes = [getattr(each, "grad_fn", getattr(each, "node", None)) for each in outputs]
        while nodes:
            node: Any = nodes.pop()
            # One with a variable adds up the gradient of a leaf, and comes before all others.
            if node is None or hasattr(node, "variable") or _NUMBER in node.metadata:
                continue
            number = node.metadata[_NUMBER] = node._sequence_nr()
            place = bisect_right(self._starts, number)
            made = self._counts[place]
            node._set_sequence_nr(
                made + number - self._starts[place - 1]
                if place % 2  # of a backward pass
                else number - made
            )
            nodes += [each for each, _ in node.next_functions]
