"""The workspaces of convolutions: against what cuDNN reports, and as PyTorch's operators ask for
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpumemnet.cudnn.execution_plans import BACKWARD_DATA, BACKWARD_FILTER, FORWARD
from gpumemnet.gpu import device_profile
from gpumemnet.tracing.operators.elementwise import result_layout
from gpumemnet.tracing.operators.library_workspaces import (
    workspace_by_rules,
)
from gpumemnet.tracing.operators.rules import Platform, Scratch, scratch
from gpumemnet.units import GIB, MIB
from tests.convolutions import square

OPERATIONS = (FORWARD, BACKWARD_DATA, BACKWARD_FILTER)


# Answers of cuDNN 9.28 for 32 images, the first plan that PyTorch takes: GPU, operation, type,
# convolution, workspace bytes.
WIDE_FILTERS = {"width": 56, "channels": 64, "outputs": 64, "filter_width": 3, "padding": 1}
ANSWERED: list[tuple[str, str, torch.dtype, int]] = [
    ("A100", BACKWARD_FILTER, torch.float32, 52_855_319),
    ("H100", BACKWARD_FILTER, torch.float32, 51_822_803),
    ("RTX3090", BACKWARD_FILTER, torch.float32, 52_412_843),
    ("A100", FORWARD, torch.float16, 25_763_856),
    ("RTX3090", BACKWARD_FILTER, torch.float16, 26_796_495),
    ("H100", BACKWARD_DATA, torch.float16, 25_763_987),
]


@pytest.mark.parametrize(("gpu", "operation", "dtype", "reported"), ANSWERED)
def test_rules_come_near_the_answers_of_cudnn(
    gpu: str, operation: str, dtype: torch.dtype, reported: int
) -> None:
    found = workspace_by_rules(
        square(**WIDE_FILTERS, dtype=dtype), operation, Platform(device=device_profile(gpu))
    )
    assert found.expected_bytes == pytest.approx(reported, rel=0.05, abs=3 * MIB)


def test_patches_that_do_not_overlap_need_no_workspace(platform: Platform) -> None:
    patches, overlapping = square(224, 3, 768, 16, stride=16), square(224, 3, 768, 16, stride=8)
    assert workspace_by_rules(patches, BACKWARD_FILTER, platform).expected_bytes == 0
    assert workspace_by_rules(overlapping, BACKWARD_FILTER, platform).expected_bytes > 0
    deeper = square(56, 96, 192, 2, stride=2)
    assert workspace_by_rules(deeper, BACKWARD_FILTER, platform).expected_bytes == sum(
        deeper.tensor_bytes
    )


# Width of image, channels, outputs, width of filter, padding; then the largest workspace of FFT,
# tiled FFT and Winograd that cuDNN 7.5 reports for 32 images in fp32, forward and for the data.
# From out_example.txt of github.com/Slimakanzer/cudnn-benchmark.


def test_a_search_may_try_more(platform: Platform) -> None:
    wide = replace(
        platform,
        cudnn_benchmark=True,
        further_search_bytes=lambda convolution, operation, capacity_bytes: GIB,
    )
    layer = lambda: nn.Conv2d(64, 128, 3, padding=1, bias=False)  # noqa: E731
    seen = trained(layer, (8, 64, 56, 56), wide)
    (search,) = [piece for piece in seen.pieces["convolution"] if piece.once]
    assert search.expected_bytes == GIB


class Seen(TorchDispatchMode):
    """Collects the scratch memory of what runs, by operator."""

    def __init__(self, platform: Platform) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.platform = platform
        self.pieces: dict[str, list[Scratch]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [
            each
            for each in (result if isinstance(result, list | tuple) else [result])
            if isinstance(each, Tensor)
        ]
        self.pieces.setdefault(func._opname, []).extend(
            scratch(func, args, kwargs or {}, outputs, self.platform)
        )
        return result


def trained(
    layer: Callable[[], nn.Module], shape: tuple[int, ...], platform: Platform, **tensor: Any
) -> Seen:
    """One forward and backward pass of a layer on meta tensors; the gradient that flows in is
    dense."""
    layout = tensor.pop("memory_format", torch.contiguous_format)
    with torch.device("meta"):
        module = layer().to(memory_format=layout, **tensor)  # type: ignore[call-overload]
        images = torch.empty(shape, requires_grad=True, **tensor).to(memory_format=layout)
        seen = Seen(platform)
        with seen:
            output = module(images)
            output.backward(torch.empty_like(output, memory_format=layout))
    return seen


def bytes_of(pieces: list[Scratch]) -> list[tuple[int, bool]]:
    return [(piece.expected_bytes, piece.held) for piece in pieces]


IMAGE, RESULT, WEIGHT = 8 * 64 * 56 * 56, 8 * 128 * 56 * 56, 64 * 128 * 9


def test_tensor_cores_work_on_copies_of_channels_first_tensors(platform: Platform) -> None:
    layer = lambda: nn.Conv2d(64, 128, 3, padding=1, bias=False)  # noqa: E731
    seen = trained(layer, (8, 64, 56, 56), platform, dtype=torch.bfloat16)
    (forward,) = seen.pieces["convolution"]
    assert 2 * (IMAGE + RESULT) <= forward.expected_bytes <= 1.1 * 2 * (IMAGE + RESULT + WEIGHT)
    data, weight = seen.pieces["convolution_backward"]
    assert data.expected_bytes >= 2 * (IMAGE + RESULT)
    assert weight.expected_bytes >= 2 * (IMAGE + RESULT) + 2 * 2 * WEIGHT, (
        "partial sums of the gradient, too"
    )


@pytest.mark.parametrize("gpu", ["V100", "T4"])
def test_tensor_cores_before_ampere_take_fp16_alone(gpu: str) -> None:
    convolution = square(56, 64, 128, 3, 1)
    platform = Platform(device=device_profile(gpu))
    assert workspace_by_rules(convolution, FORWARD, platform).expected_bytes < MIB
    assert (
        workspace_by_rules(
            replace(convolution, dtype=torch.float16), FORWARD, platform
        ).expected_bytes
        > 0
    )
    assert (
        workspace_by_rules(
            replace(convolution, dtype=torch.bfloat16), FORWARD, platform
        ).expected_bytes
        == 0
    )


def test_channels_last_needs_no_copies_of_half_precision(platform: Platform) -> None:
    layout = {"dtype": torch.bfloat16, "memory_format": torch.channels_last}
    seen = trained(
        lambda: nn.Conv2d(64, 128, 3, padding=1, bias=False), (8, 64, 56, 56), platform, **layout
    )
    assert sum(piece.expected_bytes for piece in seen.pieces["convolution"]) < MIB
    data, weight = seen.pieces["convolution_backward"]
    assert data.expected_bytes < MIB
    assert weight.expected_bytes < 64 * 2 * WEIGHT


def test_a_layout_that_cudnn_does_not_read_is_copied_and_held(platform: Platform) -> None:
    with torch.device("meta"):
        layer = nn.Conv2d(64, 128, 3, padding=1, bias=False)
        images = torch.empty(8, 64, 56, 56, requires_grad=True)
        with Seen(platform) as seen:
            layer(images).sum().backward()  # the gradient of a sum is one value, expanded
    assert bytes_of(seen.pieces["convolution_backward"])[0] == (4 * RESULT, True)
    contiguous, last = (
        torch.empty(2, 8, 4, 4),
        torch.empty(2, 8, 4, 4).to(memory_format=torch.channels_last),
    )
    assert result_layout(contiguous, contiguous) == torch.contiguous_format
    assert result_layout(contiguous, last) == result_layout(last, contiguous) == torch.channels_last
    assert result_layout(last.double(), last.double()) == torch.contiguous_format


def test_pytorch_s_own_depthwise_kernels_need_none(platform: Platform) -> None:
    seen = trained(
        lambda: nn.Conv2d(64, 64, 7, padding=3, groups=64, bias=False), (8, 64, 56, 56), platform
    )
    assert seen.pieces["convolution"] == seen.pieces["convolution_backward"] == []


def test_the_gradient_of_a_bias_is_a_sum_over_the_others(platform: Platform) -> None:
    pieces = trained(lambda: nn.Conv2d(64, 128, 3, padding=1), (64, 64, 56, 56), platform).pieces[
        "convolution_backward"
    ]
    assert [piece.kind for piece in pieces] == [
        "convolution",
        "convolution",
        "reduction",
        "reduction",
    ]
    assert (
        pieces[-2].expected_bytes == pieces[-2].bound_bytes == 4 * 128 * 4
    )  # each of 128 sums is split over 4 blocks


def test_a_transposed_convolution_is_the_backward_pass_of_one(platform: Platform) -> None:
    seen = trained(
        lambda: nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False), (8, 64, 28, 28), platform
    )
    same = square(56, 32, 64, 4, 1, 2, batch=8)
    found = [
        workspace_by_rules(same, operation, platform)
        for operation in (BACKWARD_DATA, FORWARD, BACKWARD_FILTER)
    ]
    pieces = [*seen.pieces["convolution"], *seen.pieces["convolution_backward"]]
    wanted = [(each.expected_bytes, each.bound_bytes) for each in found]
    assert [(piece.expected_bytes, piece.bound_bytes) for piece in pieces] == wanted


def test_benchmarking_tries_each_shape_once_and_all_algorithms(platform: Platform) -> None:
    trying = replace(platform, cudnn_benchmark=True)
    first = trained(lambda: nn.Conv2d(64, 128, 3, padding=1, bias=False), (8, 64, 56, 56), trying)
    again = trained(lambda: nn.Conv2d(64, 128, 3, padding=1, bias=False), (8, 64, 56, 56), trying)
    other = trained(lambda: nn.Conv2d(64, 128, 3, padding=1, bias=False), (16, 64, 56, 56), trying)
    tried, chosen = first.pieces["convolution"]
    assert (tried.kind, chosen.kind, chosen.once) == ("convolution_benchmark", "convolution", None)
    assert tried.bound_bytes == tried.expected_bytes >= chosen.bound_bytes
    assert tried.once is not None
    assert hash(tried.once) == hash(again.pieces["convolution"][0].once)
    assert tried.once == again.pieces["convolution"][0].once
    assert tried.once != other.pieces["convolution"][0].once
    backward = first.pieces["convolution_backward"]
    assert len({piece.once for piece in backward if piece.once is not None} | {tried.once}) == 3
