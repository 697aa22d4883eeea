"""The workspaces of convolutions: against what cuDNN reports, and as PyTorch's operators ask for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpumemnet.gpu.catalogue import device_profile
from gpumemnet.tracing.platform import Platform
from gpumemnet.tracing.workspaces.convolution import result_layout
from gpumemnet.tracing.workspaces.cudnn import (
    BACKWARD_DATA,
    BACKWARD_FILTER,
    FORWARD,
    Convolution,
    benchmark_workspace,
    fft_bytes,
    fft_tiling_bytes,
    winograd_bytes,
    workspace,
)
from gpumemnet.tracing.workspaces.rules import Scratch, scratch
from gpumemnet.units import GIB

OPERATIONS = (FORWARD, BACKWARD_DATA, BACKWARD_FILTER)

# Width of image, channels, outputs, width of filter, padding, stride; then the workspaces that cuDNN 7.5 reports for 32 images in
# fp32: FFT, tiled FFT, Winograd forward; FFT of the data and of the filter, Winograd of the data backward.  0: not supported.
# From out_example.txt of github.com/Slimakanzer/cudnn-benchmark.
REPORTED = [
    ((3, 256, 324, 3, 1, 1), (212963328, 441769984, 14616576, 217976832, 191476224, 14616576)),
    ((5, 256, 24, 3, 1, 1), (33251328, 65757184, 6045696, 19095552, 20720640, 6045696)),
    ((10, 512, 486, 3, 1, 1), (620015616, 1221926912, 77220864, 618098688, 579529728, 77220864)),
    ((19, 512, 486, 3, 1, 1), (2317398016, 1221926912, 150801408, 2310156288, 2188290816, 150801408)),
    ((38, 256, 16, 3, 1, 1), (415383552, 93634560, 125927424, 276971520, 297082880, 125927424)),
    ((5, 128, 256, 3, 0, 1), (86114304, 196108288, 6488064, 95551488, 75792384, 11796480)),
    ((3, 256, 128, 1, 0, 1), (94502912, 9470368, 0, 85065728, 75644928, 0)),
    ((38, 256, 256, 1, 0, 1), (2491678720, 178258752, 0, 2491678720, 2261909504, 0)),
    ((10, 128, 256, 3, 1, 2), (0, 196108288, 0, 0, 0, 0)),
    ((75, 64, 64, 3, 1, 1), (818282496, 53526528, 213516288, 818282496, 591339520, 213516288)),
    ((300, 3, 64, 7, 3, 2), (0, 19546112, 0, 0, 0, 0)),
]


def square(
    width: int, channels: int, outputs: int, filter_width: int, padding: int = 0, stride: int = 1, **more: Any
) -> Convolution:
    result = (width + 2 * padding - filter_width) // stride + 1
    shape: dict[str, Any] = {
        "batch": 32,
        "channels": channels,
        "outputs": outputs,
        "image": (width, width),
        "result": (result, result),
        "filter": (filter_width, filter_width),
        "stride": (stride, stride),
        "padding": (padding, padding),
        "dilation": (1, 1),
        "groups": 1,
        "dtype": torch.float32,
        "channels_last": False,
    }
    return Convolution(**(shape | more))


@pytest.mark.parametrize(("shape", "reported"), REPORTED)
def test_the_transforms_take_what_cudnn_reports(shape: tuple[int, ...], reported: tuple[int, ...]) -> None:
    convolution = square(*shape)
    fft, tiling, winograd, fft_data, fft_filter, winograd_data = reported
    assert fft_bytes(convolution, FORWARD) == pytest.approx(fft, rel=0.0004)
    assert fft_bytes(convolution, BACKWARD_DATA) == pytest.approx(fft_data, rel=0.0004)
    assert fft_tiling_bytes(convolution) == pytest.approx(tiling, rel=0.003)
    assert winograd_bytes(convolution, FORWARD) == winograd
    assert winograd_bytes(convolution, BACKWARD_DATA) == winograd_data
    assert fft_filter <= fft_bytes(convolution, BACKWARD_FILTER) <= 1.5 * fft_filter


def test_the_transforms_take_what_the_sample_of_cudnn_9_prints() -> None:
    convolution = square(28, 1, 20, 5, batch=1)  # conv1 of mnistCUDNN, cuDNN 9.10 on an RTX 3080
    assert fft_bytes(convolution, FORWARD) == 184_784
    assert fft_tiling_bytes(convolution) == 178_432
    assert winograd_bytes(convolution, FORWARD) == 2_057_744


def test_benchmarking_one_small_convolution_may_take_gigabytes(platform: Platform) -> None:
    # github.com/pytorch/pytorch/issues/22741: more than 8 GB for the gradient of the filter
    convolution = square(168, 128, 128, 3, 1, batch=1, image=(168, 64), result=(168, 64), dtype=torch.float16)
    expected, bound = benchmark_workspace(convolution, BACKWARD_FILTER, platform)
    assert 8e9 < expected <= bound < 9e9
    small = replace(platform, device=replace(platform.device, capacity_bytes=8 * GIB))
    assert benchmark_workspace(convolution, BACKWARD_FILTER, small)[1] < 0.1 * bound  # what exceeds the GPU is not tried


class Seen(TorchDispatchMode):
    """Collects the scratch memory of what runs, by operator."""

    def __init__(self, platform: Platform) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.platform = platform
        self.pieces: dict[str, list[Scratch]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [each for each in (result if isinstance(result, list | tuple) else [result]) if isinstance(each, Tensor)]
        self.pieces.setdefault(func._opname, []).extend(scratch(func, args, kwargs or {}, outputs, self.platform))
        return result


def trained(layer: Callable[[], nn.Module], shape: tuple[int, ...], platform: Platform, **tensor: Any) -> Seen:
    """One forward and backward pass of a layer on meta tensors; the gradient that flows in is dense."""
    layout = tensor.pop("memory_format", torch.contiguous_format)
    with torch.device("meta"):
        module = layer().to(memory_format=layout, **tensor)
        images = torch.empty(shape, requires_grad=True, **tensor).to(memory_format=layout)
        with Seen(platform) as seen:
            output = module(images)
            output.backward(torch.empty_like(output, memory_format=layout))
    return seen


def bytes_of(pieces: list[Scratch]) -> list[tuple[int, bool]]:
    return [(piece.expected_bytes, piece.held) for piece in pieces]


IMAGE, RESULT, WEIGHT = 8 * 64 * 56 * 56, 8 * 128 * 56 * 56, 64 * 128 * 9


@pytest.mark.parametrize("itemsize", [4, 2])
def test_tensor_cores_work_on_copies_of_channels_first_tensors(itemsize: int, platform: Platform) -> None:
    dtype = {4: torch.float32, 2: torch.bfloat16}[itemsize]
    seen = trained(lambda: nn.Conv2d(64, 128, 3, padding=1, bias=False), (8, 64, 56, 56), platform, dtype=dtype)
    copies = (IMAGE + RESULT + WEIGHT) * itemsize
    sums = 4 * WEIGHT if itemsize == 2 else 0
    assert bytes_of(seen.pieces["convolution"]) == [(copies, False)]
    assert bytes_of(seen.pieces["convolution_backward"]) == [(copies, False), (copies + sums, False)]


@pytest.mark.parametrize("gpu", ["V100", "T4"])
def test_tensor_cores_before_ampere_take_fp16_alone(gpu: str) -> None:
    convolution = square(56, 64, 128, 3, 1)
    platform = Platform(device=device_profile(gpu))
    assert workspace(convolution, FORWARD, platform)[0] == 0
    assert workspace(replace(convolution, dtype=torch.float16), FORWARD, platform)[0] > 0
    assert workspace(replace(convolution, dtype=torch.bfloat16), FORWARD, platform)[0] == 0


def test_without_tf32_nothing_is_expected_and_winograd_bounds_it(platform: Platform) -> None:
    convolution = square(56, 64, 128, 3, 1)
    exact = replace(platform, tf32=False)
    assert workspace(convolution, FORWARD, exact) == (0, winograd_bytes(convolution, FORWARD))


def test_a_first_layer_of_three_channels_is_expected_to_need_none(platform: Platform) -> None:
    assert workspace(square(224, 3, 64, 7, 3, 2), FORWARD, platform)[0] == 0


def test_wide_filters_are_expected_to_be_transformed(platform: Platform) -> None:
    convolution = square(27, 64, 192, 5, 2)
    assert workspace(convolution, FORWARD, platform)[0] == fft_tiling_bytes(convolution)
    strided = square(27, 64, 192, 5, 2, 2)
    assert workspace(strided, FORWARD, platform)[0] < fft_tiling_bytes(strided)


def test_channels_last_needs_no_copies_but_of_odd_channels(platform: Platform) -> None:
    layout = {"dtype": torch.bfloat16, "memory_format": torch.channels_last}
    seen = trained(lambda: nn.Conv2d(64, 128, 3, padding=1, bias=False), (8, 64, 56, 56), platform, **layout)
    assert bytes_of(seen.pieces["convolution"]) == []
    assert bytes_of(seen.pieces["convolution_backward"]) == [(4 * WEIGHT, False)]
    seen = trained(lambda: nn.Conv2d(3, 64, 3, padding=1, bias=False), (8, 3, 56, 56), platform, **layout)
    padded = 2 * (8 * 8 * 56 * 56 + 8 * 64 * 9)  # three channels become eight
    assert bytes_of(seen.pieces["convolution"]) == [(padded, False)]


def test_a_layout_that_cudnn_does_not_read_is_copied_and_held(platform: Platform) -> None:
    with torch.device("meta"):
        layer = nn.Conv2d(64, 128, 3, padding=1, bias=False)
        images = torch.empty(8, 64, 56, 56, requires_grad=True)
        with Seen(platform) as seen:
            layer(images).sum().backward()  # the gradient of a sum is one value, expanded
    assert bytes_of(seen.pieces["convolution_backward"])[0] == (4 * RESULT, True)
    contiguous, last = torch.empty(2, 8, 4, 4), torch.empty(2, 8, 4, 4).to(memory_format=torch.channels_last)
    assert result_layout(contiguous, contiguous) == torch.contiguous_format
    assert result_layout(contiguous, last) == result_layout(last, contiguous) == torch.channels_last
    assert result_layout(last.double(), last.double()) == torch.contiguous_format


def test_pytorch_s_own_depthwise_kernels_need_none(platform: Platform) -> None:
    seen = trained(lambda: nn.Conv2d(64, 64, 7, padding=3, groups=64, bias=False), (8, 64, 56, 56), platform)
    assert seen.pieces["convolution"] == seen.pieces["convolution_backward"] == []


def test_the_gradient_of_a_bias_is_a_sum_over_the_others(platform: Platform) -> None:
    pieces = trained(lambda: nn.Conv2d(64, 128, 3, padding=1), (64, 64, 56, 56), platform).pieces["convolution_backward"]
    assert [piece.kind for piece in pieces] == ["convolution", "convolution", "reduction", "reduction"]
    assert pieces[-2].expected_bytes == pieces[-2].bound_bytes == 4 * 128 * 4  # each of 128 sums is split over 4 blocks


def test_frozen_tensors_have_no_gradient_to_work_for(platform: Platform) -> None:
    with torch.device("meta"):
        layer = nn.Conv2d(64, 128, 3, padding=1, bias=False)
        with Seen(platform) as seen:
            output = layer(torch.empty(8, 64, 56, 56))
            output.backward(torch.empty_like(output))
    assert len(seen.pieces["convolution_backward"]) == 1  # the first layer's images need none


def test_a_transposed_convolution_is_the_backward_pass_of_one(platform: Platform) -> None:
    seen = trained(lambda: nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False), (8, 64, 28, 28), platform)
    same = square(56, 32, 64, 4, 1, 2, batch=8)
    wanted = [workspace(same, operation, platform) for operation in (BACKWARD_DATA, FORWARD, BACKWARD_FILTER)]
    pieces = [*seen.pieces["convolution"], *seen.pieces["convolution_backward"]]
    assert [(piece.expected_bytes, piece.bound_bytes) for piece in pieces] == wanted


def test_one_dimension_is_two_of_which_one_is_flat(platform: Platform) -> None:
    line = trained(lambda: nn.Conv1d(64, 128, 3, padding=1, bias=False), (8, 64, 3136), platform)
    image = trained(lambda: nn.Conv2d(64, 128, (1, 3), padding=(0, 1), bias=False), (8, 64, 1, 3136), platform)
    assert line.pieces["convolution"] == image.pieces["convolution"]
    assert line.pieces["convolution_backward"] == image.pieces["convolution_backward"]


def test_benchmarking_tries_each_shape_once_and_all_algorithms(platform: Platform) -> None:
    trying = replace(platform, cudnn_benchmark=True)
    first = trained(lambda: nn.Conv2d(64, 128, 3, padding=1, bias=False), (8, 64, 56, 56), trying)
    again = trained(lambda: nn.Conv2d(64, 128, 3, padding=1, bias=False), (8, 64, 56, 56), trying)
    other = trained(lambda: nn.Conv2d(64, 128, 3, padding=1, bias=False), (16, 64, 56, 56), trying)
    tried, chosen = first.pieces["convolution"]
    assert (tried.kind, chosen.kind, chosen.once) == ("convolution_benchmark", "convolution", None)
    assert tried.bound_bytes >= max(chosen.bound_bytes, fft_bytes(square(56, 64, 128, 3, 1, batch=8), FORWARD))
    assert tried.once is not None
    assert hash(tried.once) == hash(again.pieces["convolution"][0].once)
    assert tried.once == again.pieces["convolution"][0].once
    assert tried.once != other.pieces["convolution"][0].once
    backward = first.pieces["convolution_backward"]
    assert len({piece.once for piece in backward if piece.once is not None} | {tried.once}) == 3


@settings(max_examples=60)
@given(
    batch=st.integers(1, 64),
    groups=st.integers(1, 4),
    channels=st.integers(1, 40),
    outputs=st.integers(1, 40),
    sizes=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 7)), min_size=1, max_size=3),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    last=st.booleans(),
    gpu=st.sampled_from(["V100", "A100", "H100", "RTX 5090"]),
)
def test_a_bound_is_never_below_what_is_expected(
    batch: int,
    groups: int,
    channels: int,
    outputs: int,
    sizes: list[tuple[int, int]],
    stride: int,
    dilation: int,
    dtype: torch.dtype,
    last: bool,
    gpu: str,
) -> None:
    image = tuple(size + 2 * filter_width for size, filter_width in sizes)
    filters = tuple(width for _, width in sizes)
    convolution = Convolution(
        batch=batch,
        channels=channels * groups,
        outputs=outputs * groups,
        image=image,
        result=tuple((size - dilation * (width - 1) - 1) // stride + 1 for size, width in zip(image, filters, strict=True)),
        filter=filters,
        stride=(stride,) * len(sizes),
        padding=(0,) * len(sizes),
        dilation=(dilation,) * len(sizes),
        groups=groups,
        dtype=dtype,
        channels_last=last,
    )
    platform = Platform(device=device_profile(gpu))
    for operation in OPERATIONS:
        expected, bound = workspace(convolution, operation, platform)
        tried, most = benchmark_workspace(convolution, operation, platform)
        assert 0 <= expected <= bound
        assert 0 <= tried <= most
        assert most <= max(platform.device.capacity_bytes, bound)
