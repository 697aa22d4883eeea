"""Workspace sizes of cuDNN convolutions by algorithm, and the algorithm that is expected to run.

PyTorch allocates the workspace of the plan that cuDNN's heuristics rank first (``aten/src/ATen/native/cudnn/Conv_v8.cpp``), and
frees it after the call.  ``torch.backends.cudnn.benchmark`` changes the first call with new shapes.  PyTorch then allocates the
largest workspace of *all* plans that fit into free memory, times the plans, frees it and empties the allocator's cache.

The formulas for FFT, tiled FFT and Winograd reproduce reported workspaces within 0.3 %, most of them to the byte.  The reports
are those of cuDNN 7.5 for the 26 convolutions in ``out_example.txt`` of github.com/Slimakanzer/cudnn-benchmark, and those of
cuDNN 9.10 in its sample ``mnistCUDNN``.  The exception is the filter's gradient by FFT, for which only an upper bound is known.
The algorithm that runs is estimated from published kernel traces of fp32 and fp16 networks on Volta, Ampere and Blackwell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from gpumemnet.physics.memory_layouts import TENSOR_CORE_VECTOR_BYTES, TF32_SMALLEST_CHANNELS
from gpumemnet.tracing.platform import Platform
from gpumemnet.tracing.workspaces.scratch import ceil_div, round_up

FORWARD: Final = "forward"
BACKWARD_DATA: Final = "backward_data"
BACKWARD_FILTER: Final = "backward_filter"

COMPLEX_BYTES: Final = 8
SMALLEST_FFT: Final = 16
LARGEST_FFT: Final = 256
FFT_TILE: Final = 32
FFT_TILES_AT_ONCE: Final = 2
WINOGRAD_TILES: Final[dict[int, int]] = {3: 4, 5: 9}
"""Width of a square filter → width of the output tile of one transform: F(4x4, 3x3) and F(9x9, 5x5)."""
WINOGRAD_BATCH: Final = 16
"""Winograd pads the batch to a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionCoefficients:
    """Empirical coefficients, which measured rows can refit.

    Attributes:
        operand_copies: share of the two operands' bytes that a tensor-core kernel copies if the tensors are not channels last.
            Traces show two layout conversions (``nchwToNhwcKernel``) for every such convolution: forward, backward, and for the
            weights.
        result_copies: the same share for the result.  Traces show a third conversion for 10 to 12 of 12 to 16 convolutions.
        smallest_channels: fewest channels per group for which fp32 runs on TF32 tensor cores; a first layer of three does not.
        fft_from_filter: smallest filter width for which the heuristics prefer the tiled FFT at stride 1 (5 x 5 in AlexNet).
        fp32_sums: number of fp32 copies of the weight gradient in which half-precision kernels accumulate; an assumption.
        benchmark_share: share of the largest workspace of all algorithms that benchmarking is expected to allocate.
    """

    operand_copies: float = 1.0
    result_copies: float = 1.0
    smallest_channels: int = TF32_SMALLEST_CHANNELS
    fft_from_filter: int = 5
    fp32_sums: float = 1.0
    benchmark_share: float = 1.0


COEFFICIENTS: Final = ConvolutionCoefficients()


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution of images ``[batch, channels, *image]`` to ``[batch, outputs, *result]``.

    A transposed convolution exchanges image and result: its forward pass is the backward pass of the data.

    Attributes:
        batch: samples.
        channels, outputs: channels of the image and of the result, summed over the groups.
        image, result, filter: sizes of the spatial dimensions, one to three.
        stride, padding, dilation: by spatial dimension.
        groups: number of independent convolutions into which the channels are split.
        dtype: type of the tensors.
        channels_last: whether the memory layout of the tensors is channels last.
    """

    batch: int
    channels: int
    outputs: int
    image: tuple[int, ...]
    result: tuple[int, ...]
    filter: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    channels_last: bool

    @property
    def filters(self) -> int:
        """Number of pairs of input and output channel within a group."""
        return (self.channels // self.groups) * (self.outputs // self.groups)

    @property
    def weight_elements(self) -> int:
        """Number of elements of the weight."""
        return self.filters * self.groups * math.prod(self.filter)

    @property
    def planes(self) -> tuple[int, int]:
        """Number of image planes and of result planes of one group, over the batch."""
        return self.batch * (self.channels // self.groups), self.batch * (self.outputs // self.groups)

    @property
    def is_unit(self) -> bool:
        """Whether stride and dilation are 1, as transforms require."""
        return set(self.stride) <= {1} and set(self.dilation) <= {1}

    @property
    def is_depthwise(self) -> bool:
        """Whether every group has one channel."""
        return self.groups > 1 and self.groups == self.channels


def workspace(
    convolution: Convolution, operation: str, platform: Platform, coefficients: ConvolutionCoefficients = COEFFICIENTS
) -> tuple[int, int]:
    """Return expected bytes and upper bound of the workspace of one operation, after its algorithm is chosen."""
    copies = layout_copies(convolution, operation, platform, coefficients)
    if convolution.channels_last:  # FFT and Winograd support channels first only
        return copies, copies
    wide = min(convolution.filter) >= coefficients.fft_from_filter
    transformed = fft_tiling_bytes(convolution) if wide and convolution.is_unit else winograd_bytes(convolution, operation)
    expected = transformed if wide and convolution.is_unit and convolution.groups == 1 else copies
    return expected, max(copies, transformed)


def benchmark_workspace(
    convolution: Convolution, operation: str, platform: Platform, coefficients: ConvolutionCoefficients = COEFFICIENTS
) -> tuple[int, int]:
    """Return expected bytes and upper bound of the workspace for benchmarking all algorithms of one operation.

    Algorithms that exceed the GPU's memory are skipped.  PyTorch also skips those that exceed the memory free at that moment.
    """
    copies = layout_copies(convolution, operation, platform, coefficients)
    if convolution.channels_last:
        return copies, copies
    transforms = fft_bytes(convolution, operation), fft_tiling_bytes(convolution), winograd_bytes(convolution, operation)
    largest = max(copies, *(amount for amount in (*transforms, 0) if amount <= platform.device.capacity_bytes))
    return max(copies, round(largest * coefficients.benchmark_share)), largest


def layout_copies(convolution: Convolution, operation: str, platform: Platform, coefficients: ConvolutionCoefficients) -> int:
    """Return the bytes of the copies that a tensor-core kernel makes of operands in other layouts.

    It copies operands that are not channels last, or whose channels need padding, by the rules of
    :mod:`gpumemnet.physics.memory_layouts`.
    """
    if not uses_tensor_cores(convolution, platform, coefficients):
        return 0
    vector = TENSOR_CORE_VECTOR_BYTES // convolution.dtype.itemsize
    channels, outputs = round_up(convolution.channels, vector), round_up(convolution.outputs, vector)
    group_channels = round_up(convolution.channels // convolution.groups, vector)
    amounts = {
        "image": convolution.batch * channels * math.prod(convolution.image),
        "result": convolution.batch * outputs * math.prod(convolution.result),
        "weight": group_channels * outputs * math.prod(convolution.filter),
    }
    copied = dict.fromkeys(amounts, True)
    if convolution.channels_last:
        odd = channels != convolution.channels
        copied = {"image": odd, "result": outputs != convolution.outputs, "weight": odd}
    target = {FORWARD: "result", BACKWARD_DATA: "image", BACKWARD_FILTER: "weight"}[operation]
    shares = {name: coefficients.result_copies if name == target else coefficients.operand_copies for name in amounts}
    elements = sum(amounts[name] * shares[name] for name in amounts if copied[name])
    sums = 0.0
    if operation == BACKWARD_FILTER and convolution.dtype.itemsize == 2:
        sums = coefficients.fp32_sums * convolution.weight_elements * 4
    return round(elements * convolution.dtype.itemsize + sums)


def uses_tensor_cores(convolution: Convolution, platform: Platform, coefficients: ConvolutionCoefficients) -> bool:
    """Whether the convolution is expected to run on tensor cores: half types, and fp32 as TF32 if allowed."""
    if convolution.is_depthwise:
        return False
    if convolution.dtype == torch.float16:
        return platform.compute_capability >= (7, 0)
    if convolution.dtype == torch.bfloat16:
        return platform.compute_capability >= (8, 0)
    fewest = min(convolution.channels, convolution.outputs) // convolution.groups
    is_wide = fewest >= coefficients.smallest_channels
    return convolution.dtype == torch.float32 and platform.tf32 and platform.compute_capability >= (8, 0) and is_wide


def fft_bytes(convolution: Convolution, operation: str) -> int:
    """Return the workspace bytes of the FFT over whole images.

    It is 0 where cuDNN does not support this: strides, dilation, images above 256, three dimensions.  Two buffers hold
    operand and filters, or the result, in the frequency domain, padded to the next power of two.  A third holds the flipped
    weight.
    For the filter's gradient this is an upper bound, up to 48 % above what cuDNN 7.5 reports.
    """
    size = max(image + 2 * padding for image, padding in zip(convolution.image, convolution.padding, strict=True))
    if not convolution.is_unit or len(convolution.image) != 2 or size > LARGEST_FFT:
        return 0
    width = max(SMALLEST_FFT, 1 << (size - 1).bit_length())
    plane = width * (width // 2 + 1) * COMPLEX_BYTES
    images, results = convolution.planes
    if operation == BACKWARD_FILTER:
        batches = (convolution.batch + 1) * (images + results) // convolution.batch
        signal = max(images * math.prod(convolution.image), results * math.prod(convolution.result)) * 4
        return plane * (2 * convolution.filters + batches) + signal
    operand, target = (images, results) if operation == FORWARD else (results, images)
    weight = convolution.filters * math.prod(convolution.filter) * 4
    return plane * 2 * max(operand + convolution.filters, target) + weight


def fft_tiling_bytes(convolution: Convolution) -> int:
    """Return the workspace bytes of the FFT over tiles of 32 x 32, two tiles at a time.

    Filters that are one row high use tiles of 32 in each row at stride 1.  The result is 0 where cuDNN does not support this:
    dilation, filters above 32, three dimensions.
    """
    if len(convolution.image) != 2 or max(convolution.filter) > FFT_TILE or set(convolution.dilation) != {1}:
        return 0
    row = (FFT_TILE // 2 + 1) * COMPLEX_BYTES
    images, results = convolution.planes
    tiles = [ceil_div(result, FFT_TILE - width + 1) for result, width in zip(convolution.result, convolution.filter, strict=True)]
    if convolution.filter[0] == 1 and convolution.is_unit:
        rows = images * convolution.image[0] + results * convolution.result[0]
        return row * (convolution.filters + min(tiles[1], FFT_TILES_AT_ONCE) * rows)
    return FFT_TILE * row * (convolution.filters + min(math.prod(tiles), FFT_TILES_AT_ONCE) * (images + results))


def winograd_bytes(convolution: Convolution, operation: str) -> int:
    """Return the workspace bytes of the Winograd transform with separate passes.

    It is 0 where cuDNN does not support this; it supports filters of 3 x 3 and 5 x 5 at stride 1.
    """
    tile = WINOGRAD_TILES.get(convolution.filter[0])
    if tile is None or not convolution.is_unit or len(convolution.filter) != 2 or len(set(convolution.filter)) != 1:
        return 0
    transform = (tile + convolution.filter[0] - 1) ** 2
    sizes = convolution.image if operation == BACKWARD_DATA else convolution.result
    tiles = round_up(convolution.batch, WINOGRAD_BATCH) * math.prod(ceil_div(size, tile) for size in sizes)
    channels = (convolution.channels + convolution.outputs) // convolution.groups
    return transform * (tiles * channels + convolution.filters) * 4
