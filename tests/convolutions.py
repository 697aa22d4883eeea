"""Convolutions of square images, as tests of their workspaces ask for them."""

from __future__ import annotations

from typing import Any

import torch

from gpumemnet.tracing.operators.library_workspaces import Convolution


def square(
    width: int,
    channels: int,
    outputs: int,
    filter_width: int,
    padding: int = 0,
    stride: int = 1,
    **more: Any,
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
