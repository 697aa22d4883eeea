"""Workspaces of convolutions by FFT and Winograd transforms, which earlier versions of cuDNN tried
when they searched.

cuDNN 9.8 and 9.28 list none of them; readings made with torch of mid 2024 (cuDNN 9.1) need them.
With them, the start-up peaks of 97 published timm runs are met within 14.4 % in the median
(``python benchmarks/real_runs.py``).  The formulas reproduce workspaces that were reported for
cuDNN 7.5 (``out_example.txt`` of github.com/Slimakanzer/cudnn-benchmark) within 0.3 %, most of them
to the byte; for the filter's gradient by FFT only an upper bound is known.
"""

from __future__ import annotations

import math
from typing import Final

from gpumemnet.cudnn.execution_plans import BACKWARD_DATA, BACKWARD_FILTER, FORWARD
from gpumemnet.tracing.operators.library_workspaces import Convolution
from gpumemnet.tracing.operators.rules import ceil_div, round_up

_COMPLEX_BYTES: Final = 8


_FLOAT_BYTES: Final = 4


_SMALLEST_FFT: Final = 16


_LARGEST_FFT: Final = 256


_FFT_TILE: Final = 32


_FFT_TILES_AT_ONCE: Final = 2


_WINOGRAD_TILES: Final[dict[int, int]] = {3: 4, 5: 9}
"""Width of a square filter → width of the output tile of one transform: F(4x4, 3x3) and F(9x9,
5x5)."""


_WINOGRAD_BATCH: Final = 16
"""Winograd pads the batch to a multiple of this."""


def largest_transform_bytes(convolution: Convolution, operation: str, capacity_bytes: int) -> int:
    """Return the largest workspace of the transforms that support ``convolution`` and fit on the
    GPU; 0 where none does."""
    if convolution.channels_last or not _is_unit(convolution) or len(convolution.image) != 2:
        return 0
    amounts = (
        _fft_bytes(convolution, operation),
        _tiled_fft_bytes(convolution),
        _winograd_bytes(convolution, operation),
    )
    return max((amount for amount in amounts if amount <= capacity_bytes), default=0)


def _is_unit(convolution: Convolution) -> bool:
    """Whether stride and dilation are 1, as transforms require."""
    return set(convolution.stride) <= {1} and set(convolution.dilation) <= {1}


def _filters(convolution: Convolution) -> int:
    """Number of pairs of input and output channel within a group."""
    return (convolution.channels // convolution.groups) * (
        convolution.outputs // convolution.groups
    )


def _planes(convolution: Convolution) -> tuple[int, int]:
    """Number of image planes and of result planes of one group, over the batch."""
    channels, outputs = (
        convolution.channels // convolution.groups,
        convolution.outputs // convolution.groups,
    )
    return convolution.batch * channels, convolution.batch * outputs


def _fft_bytes(convolution: Convolution, operation: str) -> int:
    """Workspace of the FFT over whole images: two buffers in the frequency domain, padded to a
    power of two, and the weight."""
    size = max(
        image + 2 * padding
        for image, padding in zip(convolution.image, convolution.padding, strict=True)
    )
    if size > _LARGEST_FFT:
        return 0
    width = max(_SMALLEST_FFT, 1 << (size - 1).bit_length())
    plane = width * (width // 2 + 1) * _COMPLEX_BYTES
    filters, (images, results) = _filters(convolution), _planes(convolution)
    if operation == BACKWARD_FILTER:
        batches = (convolution.batch + 1) * (images + results) // convolution.batch
        signal = (
            max(images * math.prod(convolution.image), results * math.prod(convolution.result))
            * _FLOAT_BYTES
        )
        return plane * (2 * filters + batches) + signal
    operand, target = (images, results) if operation == FORWARD else (results, images)
    weight = filters * math.prod(convolution.filter) * _FLOAT_BYTES
    return plane * 2 * max(operand + filters, target) + weight


def _tiled_fft_bytes(convolution: Convolution) -> int:
    """Workspace of the FFT over tiles of 32 x 32, two at a time; filters of one row use tiles of 32
    in each row."""
    if max(convolution.filter) > _FFT_TILE:
        return 0
    row = (_FFT_TILE // 2 + 1) * _COMPLEX_BYTES
    filters, (images, results) = _filters(convolution), _planes(convolution)
    sizes = zip(convolution.result, convolution.filter, strict=True)
    tiles = [ceil_div(result, _FFT_TILE - width + 1) for result, width in sizes]
    if convolution.filter[0] == 1:
        rows = images * convolution.image[0] + results * convolution.result[0]
        return row * (filters + min(tiles[1], _FFT_TILES_AT_ONCE) * rows)
    return (
        _FFT_TILE * row * (filters + min(math.prod(tiles), _FFT_TILES_AT_ONCE) * (images + results))
    )


def _winograd_bytes(convolution: Convolution, operation: str) -> int:
    """Workspace of the Winograd transform with separate passes, for filters of 3 x 3 and 5 x 5."""
    tile = _WINOGRAD_TILES.get(convolution.filter[0])
    if tile is None or len(set(convolution.filter)) != 1:
        return 0
    transform = (tile + convolution.filter[0] - 1) ** 2
    sizes = convolution.image if operation == BACKWARD_DATA else convolution.result
    tiles = round_up(convolution.batch, _WINOGRAD_BATCH) * math.prod(
        ceil_div(size, tile) for size in sizes
    )
    channels = (convolution.channels + convolution.outputs) // convolution.groups
    return transform * (tiles * channels + _filters(convolution)) * _FLOAT_BYTES
