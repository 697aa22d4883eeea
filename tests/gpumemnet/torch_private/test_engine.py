"""Nodes of a backward pass that records gradients run in the order that they have on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.autograd.graph as graph
from torch import Tensor
from torch.nn.functional import softplus

from gpumemnet.torch_private.engine import DeviceThread


def order(run: Callable[..., Any]) -> list[tuple[str, ...]]:
    """Return the shapes that the nodes of a last backward pass give, in their order, where ``run`` is
    the engine."""
    weights = [torch.ones(4, 3), torch.ones(3, 7), torch.ones(7, 5)]
    for each in weights:
        each.requires_grad_()

    def loss_of(fast: list[Tensor]) -> Tensor:
        x = torch.ones(2, 4)
        for each in fast:
            x = softplus(x @ each)
        return x.mean()

    nodes: list[tuple[str, ...]] = []
    total = torch.zeros(())
    for _ in range(3):
        fast = weights
        for _ in range(3):
            gradients = run(
                (loss_of(fast),), (None,), True, True, tuple(fast), accumulate_grad=False
            )
            fast = [each - 0.1 * gradient for each, gradient in zip(fast, gradients, strict=True)]
        total = total + loss_of(fast)

    def seen(name: str, given: tuple[Tensor | None, ...]) -> None:
        nodes.append((name, *(str(each.shape) for each in given if each is not None)))

    waiting, known = [total.grad_fn], {total.grad_fn}
    for node in waiting:
        assert node is not None
        node.register_prehook(partial(seen, node.name()))
        new = {each for each, _ in node.next_functions if each is not None} - known
        known |= new
        waiting += new
    run((total,), (None,), False, False, (), accumulate_grad=True)
    return nodes


def test_nodes_run_in_the_order_of_a_gpu() -> None:
    engine = graph._engine_run_backward

    def aside(
        *given: Any, **others: Any
    ) -> Any:  # as the engine's own thread runs what is on a GPU
        return device.submit(engine, *_ones(given), **others, allow_unreachable=True).result()

    def numbered(*given: Any, **others: Any) -> Any:
        return run(*_ones(given), **others, allow_unreachable=True)

    run = DeviceThread().numbered(engine)
    # Each thread counts its nodes from 0, as that of a script does.
    with (
        ThreadPoolExecutor(1) as first,
        ThreadPoolExecutor(1) as second,
        ThreadPoolExecutor(1) as device,
    ):
        expected = first.submit(order, aside).result()
        assert second.submit(order, numbered).result() == expected


def _ones(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return (given[0], tuple(map(torch.ones_like, given[0])), *given[2:])
