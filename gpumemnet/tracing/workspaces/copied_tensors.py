"""Which tensors of a convolution cuDNN copies into its workspace, by decision trees learned from
cuDNN's own answers.

The workspace of the plan that cuDNN ranks first nearly always holds copies of the image, of the
result or of both in another
layout, and some multiple of the weight: a copy, or partial sums of its gradient.
    ``copied_tensors.json`` holds one tree for each
compute capability, operation, type and layout.  ``benchmarks/convolution_workspaces.py`` makes it,
and says how far it is off.
"""

from __future__ import annotations

import json
import math
from functools import cache
from importlib import resources
from typing import Any, Final

from gpumemnet.tracing.workspaces.cudnn_convolution import Convolution

IMAGE, RESULT = 1, 2
"""Bits of a leaf's number: what is copied."""
FEATURES: Final = (
    "batch",
    "channels",
    "outputs",
    "groups",
    "filter",
    "stride",
    "dilation",
    "image",
    "result",
    "pixels",
    "odd_channels",
    "odd_outputs",
    "multiplications",
    "ratio",
    "weight",
)


def features(convolution: Convolution) -> tuple[float, ...]:
    """Return the numbers of :data:`FEATURES`: sizes, as logarithms where only their order
    matters."""
    channels, outputs = (
        convolution.channels // convolution.groups,
        convolution.outputs // convolution.groups,
    )
    image, result, taps = (
        math.prod(sizes) for sizes in (convolution.image, convolution.result, convolution.filter)
    )
    return (
        convolution.batch,
        channels,
        outputs,
        convolution.groups,
        taps,
        math.prod(convolution.stride),
        math.prod(convolution.dilation),
        image,
        result,
        convolution.batch * result,
        _odd(channels),
        _odd(outputs),
        math.log2(max(1, convolution.batch * result * channels * taps * outputs)),
        channels * image / max(1, outputs * result),
        channels * outputs * taps,
    )


def copied_bytes(convolution: Convolution, operation: str, capability: tuple[int, int]) -> int:
    """Return the expected workspace of one operation on a GPU of this compute capability."""
    node = _document()["trees"][_key(convolution, operation, capability)]
    values = features(convolution)
    while "feature" in node:
        node = node["below" if values[node["feature"]] <= node["limit"] else "above"]
    image, result, weight = convolution.tensor_bytes
    copies = (image if node["copies"] & IMAGE else 0) + (result if node["copies"] & RESULT else 0)
    return copies + round(float(node["weights"]) * weight)


def tree_name(capability: str, operation: str, itemsize: int, channels_last: bool) -> str:
    """Return the key of a tree in the file."""
    return f"{capability} {operation} {8 * itemsize}-bit {'channels last' if channels_last else 'contiguous'}"


def _odd(channels: int) -> int:
    """Return the largest power of two up to 8 that divides the channels: tensor cores read several
    at a time."""
    return math.gcd(channels, 8)


@cache
def _document() -> dict[str, Any]:
    text = (
        resources.files("gpumemnet")
        .joinpath("tracing/workspaces/copied_tensors.json")
        .read_text("utf-8")
    )
    return dict(json.loads(text))


@cache
def _nearest(capability: tuple[int, int]) -> str:
    """Return the compute capability whose trees are used: the newest that is not newer, or the
    oldest there is."""
    known = [tuple(map(int, name.split("."))) for name in _document()["capabilities"]]
    older = [each for each in known if each <= capability]
    major, minor = max(older) if older else min(known)
    return f"{major}.{minor}"


def _key(convolution: Convolution, operation: str, capability: tuple[int, int]) -> str:
    return tree_name(
        _nearest(capability), operation, convolution.dtype.itemsize, convolution.channels_last
    )
