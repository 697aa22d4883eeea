"""Layouts of results, against those that PyTorch 2.13's CUDA code returned for tensors of the same
strides."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gpumemnet.tracing.operators.elementwise import layout_rule

aten: Any = torch.ops.aten
IMAGE, PIXEL = (3, 16, 4, 4), (3, 16, 1, 1)
FORMATS = {"c": torch.contiguous_format, "l": torch.channels_last}
STRIDES: dict[tuple[tuple[int, ...], str], tuple[int, ...]] = {
    (shape, name): torch.empty(shape, device="meta", memory_format=layout).stride()
    for shape in (IMAGE, PIXEL, (3, 32, 4, 4))
    for name, layout in FORMATS.items()
}
statistic = torch.empty(16, device="meta")


class Laid(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lays out the results of every operator as on CUDA."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        rule = layout_rule(func)
        return result if rule is None else rule(args, result)


def layouts(run: Callable[..., Tensor], shape: tuple[int, ...], tensors: int) -> str:
    """The layout of ``run``'s result for every choice of its arguments', ``c`` contiguous or ``l``
    channels last, in order."""
    found = ""
    for chosen in product(FORMATS, repeat=tensors):
        given = [torch.empty(shape, device="meta", memory_format=FORMATS[name]) for name in chosen]
        with Laid():  # type: ignore[no-untyped-call]
            result = run(*given)
        found += next(
            name for name in FORMATS if STRIDES[tuple(result.shape), name] == result.stride()
        )
    return found


@pytest.mark.parametrize(
    ("run", "image", "pixel"),
    [
        (F.gelu, "cl", "cc"),
        (F.relu, "cl", "cc"),
        (F.hardswish, "cl", "cc"),
        (F.relu6, "cl", "cl"),
        (torch.clone, "cl", "cl"),
        (lambda x: x.half(), "cl", "cl"),
        (lambda x: 1 - x, "cl", "cl"),
        (torch.nan_to_num, "cl", "cl"),
        (lambda x: x + x, "cl", "cc"),
        (lambda x: x * x.mean((2, 3), keepdim=True), "cl", "cc"),
        (lambda x: F.group_norm(x, 8), "cc", "cc"),
        (lambda x: F.log_softmax(x, 1), "cc", "cc"),
        (
            lambda x: aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[0],
            "cl",
            "cl",
        ),
    ],
)
def test_results_lie_as_on_cuda(run: Callable[[Tensor], Tensor], image: str, pixel: str) -> None:
    assert layouts(run, IMAGE, 1) == image
    assert layouts(run, PIXEL, 1) == pixel


@pytest.mark.parametrize(
    ("run", "image", "pixel"),
    [
        (aten.gelu_backward, "ccll", "cccc"),
        (lambda grad, x: aten.hardtanh_backward(grad, x, 0, 6), "ccll", "cccc"),
        (lambda grad, x: aten.elu_backward(grad, 1, 1, 1, False, x), "ccll", "cccc"),
        (lambda grad, x: aten.leaky_relu_backward(grad, x, 0.1, False), "clcl", "cccc"),
        (lambda grad, x: aten.native_dropout_backward(grad, x.bool(), 2.0), "ccll", "ccll"),
        (
            lambda grad, x: aten.native_batch_norm_backward(
                grad, x, statistic, None, None, statistic, statistic, True, 1e-5, [True, True, True]
            )[0],
            "clcl",
            "clcl",
        ),
        (lambda grad, x: aten.glu_backward(grad, torch.cat([x, x], 1), 1), "cccc", None),
    ],
)
def test_gradients_lie_as_on_cuda(
    run: Callable[[Tensor, Tensor], Tensor], image: str, pixel: str | None
) -> None:
    assert layouts(run, IMAGE, 2) == image
    if pixel:
        assert layouts(run, PIXEL, 2) == pixel


def test_a_convolution_is_channels_last_if_its_input_or_weight_is() -> None:
    def convolved(weight_layout: str) -> str:
        weight = torch.empty(16, 16, 3, 3, device="meta", memory_format=FORMATS[weight_layout])
        return layouts(lambda x: F.conv2d(x, weight, padding=1), IMAGE, 1)

    assert (convolved("c"), convolved("l")) == ("cl", "ll")


def test_the_gradient_of_a_weight_lies_as_images_of_one_pixel_happen_to_and_not_as_the_weight() -> (
    None
):
    weight = torch.empty(16, 16, 3, 3, device="meta", memory_format=torch.channels_last)

    def gradients(layout: str) -> list[bool]:
        pixel = torch.empty(PIXEL, device="meta", memory_format=FORMATS[layout])
        arguments = (
            pixel,
            pixel,
            weight,
            None,
            [1, 1],
            [1, 1],
            [1, 1],
            False,
            [0, 0],
            1,
            [True, True, False],
        )
        with Laid():  # type: ignore[no-untyped-call]
            results = aten.convolution_backward(*arguments)[:2]
        return [
            each.stride() == torch.empty_like(each, memory_format=torch.channels_last).stride()
            for each in results
        ]

    assert gradients("c") == [True, False]
    assert gradients("l") == [True, True]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.smooth_l1_loss,
        F.soft_margin_loss,
        F.binary_cross_entropy,
        F.huber_loss,
        F.l1_loss,
        F.poisson_nll_loss,
    ],
)
def test_a_loss_keeps_the_storage_that_it_was_formed_in(
    loss: Callable[..., Tensor], reduction: str
) -> None:
    real = torch.rand(8, 16)
    with Laid():  # type: ignore[no-untyped-call]
        laid = loss(
            torch.empty(8, 16, device="meta"),
            torch.empty(8, 16, device="meta"),
            reduction=reduction,
        )
    found = loss(
        real, real, reduction=reduction
    )  # PyTorch's own code, the same on a CPU and on CUDA
    assert (laid.shape, laid.untyped_storage().nbytes()) == (
        found.shape,
        found.untyped_storage().nbytes(),
    )


def test_the_buffer_of_logsigmoid_is_empty() -> None:
    with Laid():  # type: ignore[no-untyped-call]
        assert [x.numel() for x in aten.log_sigmoid_forward(statistic)] == [16, 0]


def test_an_image_that_is_joined_of_parts_stays_as_large_as_these() -> None:
    parts = torch.empty(1, 36, 64, device="meta")
    with Laid():  # type: ignore[no-untyped-call]
        joined = aten.col2im(parts, [8, 8], [3, 3], [1, 1], [1, 1], [1, 1])
    assert (joined.shape, joined.untyped_storage().nbytes()) == ((1, 4, 8, 8), parts.nbytes)
