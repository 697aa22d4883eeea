"""A convolution as cuDNN sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution of images ``[batch, channels, *image]`` to ``[batch, outputs, *result]``.

    A transposed convolution exchanges image and result: its forward pass is the backward pass of
    the data.

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
    def weight_elements(self) -> int:
        """Number of elements of the weight."""
        return self.channels // self.groups * self.outputs * math.prod(self.filter)

    @property
    def tensor_bytes(self) -> tuple[int, int, int]:
        """Bytes of image, result and weight."""
        size = self.dtype.itemsize
        image = self.batch * self.channels * math.prod(self.image)
        result = self.batch * self.outputs * math.prod(self.result)
        return image * size, result * size, self.weight_elements * size

    @property
    def is_depthwise(self) -> bool:
        """Whether every group has one channel."""
        return self.groups > 1 and self.groups == self.channels
