"""What runs in place on a real device runs in place on meta tensors: both are tried, the CPU
standing for the real device."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gpumemnet.tracing.corrected import Operators, corrected, meta, operators


def identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.is_meta else tensor.data_ptr()


class Fresh(torch.autograd.Function):
    """Passes on a gradient that nothing else holds, and notes where it lies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: list[int]) -> Tensor:
        ctx.made = made
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].clone()
        ctx.made.append(identity(gradient))
        return gradient, None


class Sums(torch.autograd.Function):
    """Adds in Python, in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, made: list[int]) -> Tensor:
        ctx.made = made
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        first = gradients[0].clone()
        ctx.made.append(identity(first))
        return first + gradients[0], None


def fresh(x: Tensor, made: list[int]) -> Tensor:
    output: Tensor = Fresh.apply(x, made)  # type: ignore[no-untyped-call]
    return output


def added(x: Tensor, made: list[int]) -> Tensor:
    output: Tensor = Sums.apply(x, made)  # type: ignore[no-untyped-call]
    return output


def place_of_sum(function: Callable[[Tensor, list[int]], Tensor], device: str) -> list[int | None]:
    """For the gradient that reaches a tensor with several consumers: which of the gradients made
    holds the sum, if any."""
    made: list[int] = []
    seen: list[int] = []
    context: AbstractContextManager[object] = corrected() if device == "meta" else nullcontext()
    with context:
        leaf = torch.ones(4, 4, device=device, requires_grad=True)
        shared = leaf * 2
        shared.register_hook(lambda gradient: seen.append(identity(gradient)))  # type: ignore[no-untyped-call]
        output = function(shared, made)
        output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]
    return [made.index(place) if place in made else None for place in seen]


CONSUMERS: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "two": lambda x, made: fresh(x, made) + fresh(x, made),
    "three": lambda x, made: fresh(x, made) + fresh(x, made) + fresh(x, made),
    "residual": lambda x, made: fresh(x + fresh(x, made), made),
    "view first": lambda x, made: fresh(x, made) + torch.ones(4, 4, device=x.device) @ x.t(),
    "view last": lambda x, made: torch.ones(4, 4, device=x.device) @ x.t() + fresh(x, made),
    "expanded first": lambda x, made: fresh(x, made).sum() + x.sum(),
    "expanded last": lambda x, made: x.sum() + fresh(x, made).sum(),
    "python": added,
}


@pytest.mark.parametrize("name", CONSUMERS)
def test_gradients_are_summed_where_a_real_device_sums_them(name: str) -> None:
    assert place_of_sum(CONSUMERS[name], "meta") == place_of_sum(CONSUMERS[name], "cpu")


def test_both_ways_occur() -> None:
    assert place_of_sum(CONSUMERS["residual"], "cpu") == [0]
    assert place_of_sum(CONSUMERS["view first"], "cpu") == [None]


def test_a_watched_run_sums_in_the_same_place() -> None:
    with Operators():
        assert place_of_sum(CONSUMERS["three"], "meta") == [0]


@pytest.mark.parametrize("shape", [(3, 2, 4), (3, 5, 2, 4)])
def test_the_bias_of_a_linear_layer_is_added_in_place(shape: tuple[int, ...]) -> None:
    counts = operators(lambda: nn.Linear(4, 5, device="meta")(meta(*shape).transpose(0, 1)))
    assert (counts["add_"], counts["add"], counts["addmm"]) == (1, 0, 0)


def test_a_sum_in_the_forward_pass_is_a_tensor_of_its_own() -> None:
    counts = operators(lambda: meta(2, 3) * 1 + meta(2, 3))
    assert (counts["add_"], counts["add"]) == (0, 1)


@pytest.mark.parametrize(
    ("number", "dtype"),
    [(1, torch.float16), (0.5, torch.float16), (1, torch.int64), (0.5, torch.int64)],
)
def test_numbers_are_added_as_ever(number: float, dtype: torch.dtype) -> None:
    x = meta(2, 3, dtype=dtype, requires_grad=False)
    expected = (x + number).dtype
    with corrected():
        assert ((x + number).dtype, (number + x).dtype) == (expected, expected)


@pytest.mark.parametrize(
    ("run", "in_place"),
    [
        (lambda x, index: x[index], "index_put_"),
        (lambda x, index: x[:, index], "index_put_"),
        (lambda x, index: x.gather(0, index[:, None]), "scatter_add_"),
        (lambda x, index: x.max(1).values, "scatter_"),
        (lambda x, index: x.topk(2)[0], "scatter_"),
        (lambda x, index: x.index_select(0, index), "index_add_"),
    ],
)
def test_gradients_of_indexing_are_written_into_zeros(
    run: Callable[[Tensor, Tensor], Tensor], in_place: str
) -> None:
    index = torch.zeros(2, dtype=torch.long, device="meta")
    counts = operators(lambda: run(meta(4, 5), index))
    assert counts[in_place] == 1
    assert counts[in_place.removesuffix("_")] == 0


def test_the_same_operators_in_the_users_code_allocate() -> None:
    index = torch.zeros(2, dtype=torch.long, device="meta")
    counts = operators(lambda: torch.zeros(4, 5, device="meta").index_add(0, index, meta(2, 5)))
    assert (counts["index_add"], counts["index_add_"]) == (1, 0)


@pytest.mark.parametrize(
    ("options", "gradient"),
    [
        ({}, "binary_cross_entropy_backward"),  # one tensor
        (
            {"reduction": "none", "weight": meta(2, 3, requires_grad=False)},
            "binary_cross_entropy_backward",
        ),
        ({"pos_weight": meta(3)}, "soft_margin_loss_backward"),  # three at once
    ],
)
def test_the_gradient_of_a_loss_with_logits_is_formed_in_place(
    options: dict[str, Any], gradient: str
) -> None:
    given, target = meta(2, 3), meta(2, 3, requires_grad=False)
    loss = nn.functional.binary_cross_entropy_with_logits
    counts = operators(lambda: loss(given, target, **options))
    assert counts[gradient] == counts["log_sigmoid_forward"] == 1
    assert counts["sigmoid"] == counts["mul"] == 0
