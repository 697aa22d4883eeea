"""The torch modules of a convolutional network, registered in the order in which they run.

Blocks: VGG (arXiv 1409.1556), ResNet (1512.03385) and ResNeXt (1611.05431), DenseNet (1608.06993),
MobileNet (1704.04861), MobileNetV2 (1801.04381) and V3 (1905.02244), ShuffleNet's grouped pointwise
convolutions (1707.01083), ConvNeXt (2201.03545), U-Net (1505.04597).  Stems and heads are those of
VGG, ResNet, ResNet-D (1812.01187), MobileNetV3 and ConvNeXt; the two styles of dense prediction
bring the map of classes back to the image's size, the stem's part of it by interpolating the logits
(DeepLab).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from .blocks import Blocks, Residual, activation_class, repeated
from .cnn import (
    DENSE_PREDICTION,
    FLATTENED_SIDE,
    MAX_HIDDEN,
    MAX_NORM_GROUPS,
    STEM_REDUCTION,
    CnnArchitecture,
    granule_of,
    rounded,
)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of each pixel of ``[batch, channels, height, width]``."""

    def forward(self, features: Tensor) -> Tensor:
        """The normalised map, in the shape of ``features``."""
        return super().forward(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Scale(nn.Module):
    """One learned factor per channel, the layer scale of ConvNeXt."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((channels, 1, 1), 1e-6))

    def forward(self, features: Tensor) -> Tensor:
        """``features`` times the factors."""
        return features * self.factor


class SqueezeExcitation(nn.Module):
    """Channels times a gate in [0, 1] that is computed from their means (arXiv 1709.01507)."""

    def __init__(self, channels: int, activation: nn.Module) -> None:
        super().__init__()
        squeezed = channels // 4
        squeeze, excite = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), squeeze, activation, excite, nn.Sigmoid()
        )

    def forward(self, features: Tensor) -> Tensor:
        """The gated map."""
        return features * self.gate(features)


class PixelMlp(nn.Module):
    """Layer norm, linear, activation, linear on the channels of each pixel, in NHWC as ConvNeXt has
    them."""

    def __init__(self, channels: int, hidden: int, activation: nn.Module) -> None:
        super().__init__()
        first, second = nn.Linear(channels, hidden), nn.Linear(hidden, channels)
        self.layers = nn.Sequential(nn.LayerNorm(channels), first, activation, second)

    def forward(self, features: Tensor) -> Tensor:
        """``[batch, channels, height, width]`` to the same."""
        mixed: Tensor = self.layers(features.permute(0, 2, 3, 1))
        return mixed.permute(0, 3, 1, 2)


class Concatenated(nn.Module):
    """``features`` with the channels of ``branch(features)`` after them (DenseNet)."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, features: Tensor) -> Tensor:
        """All the channels."""
        return torch.cat((features, self.branch(features)), dim=1)


class Level(nn.Module):
    """One level of an encoder and decoder: the decoder takes the encoder's output joined with the
    output of the deeper levels.

    Args:
        encoder: runs first.
        below: goes down, through the deeper levels, and up again to the same map.
        lateral: what the encoder's output passes through before it is added (hourglass; Newell et
            al., arXiv 1603.06937); without it, the two are concatenated (U-Net).
        decoder: runs last.
    """

    def __init__(
        self, encoder: nn.Module, below: nn.Module, lateral: nn.Module | None, decoder: nn.Module
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.below = below
        self.lateral = lateral
        self.decoder = decoder

    def forward(self, features: Tensor) -> Tensor:
        """The decoder's output, as large as the encoder's."""
        skipped = self.encoder(features)
        returned = self.below(skipped)
        return self.decoder(
            torch.cat((skipped, returned), dim=1)
            if self.lateral is None
            else self.lateral(skipped) + returned
        )


Modules = list[nn.Module]
"""Modules that run one after the other."""


def network(cnn: CnnArchitecture) -> nn.Module:
    """The whole network; see :func:`dataset_builder.families.cnn.build`."""
    parts = _dense_prediction(cnn) if cnn.style in DENSE_PREDICTION else _classifier(cnn)
    return nn.Sequential(*parts)


def _classifier(cnn: CnnArchitecture) -> Modules:
    channels = 2 * cnn.widths[0] if cnn.style == "dense" else cnn.widths[0]
    parts = _stem(cnn, channels)
    for index, (width, depth) in enumerate(zip(cnn.widths, cnn.depths, strict=True)):
        stride = 1
        if index:
            halving, channels, stride = _halving(cnn, channels, width)
            parts += halving
        stage, channels = _stage(cnn, channels, width, depth, stride)
        parts.append(stage)
    if cnn.style == "dense":
        parts += _leading_norm_act(cnn, channels)
    return parts + _head(cnn, channels)


def _dense_prediction(cnn: CnnArchitecture) -> Modules:
    width, reduction = cnn.widths[0], STEM_REDUCTION[cnn.stem]
    parts = [*_stem(cnn, width), _level(cnn, 0, width, 1), *_dropout(cnn.head_dropout)]
    parts.append(nn.Conv2d(width, cnn.classes, 1))
    if reduction > 1:
        parts.append(nn.Upsample(scale_factor=reduction, mode="bilinear"))
    return parts


def _stem(cnn: CnnArchitecture, width: int) -> Modules:
    images = cnn.input_channels
    if cnn.stem == "patch":
        return _normed(cnn, images, width, 4, 4)
    if cnn.stem == "conv":
        return _activated(cnn, images, width, 3)
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    if cnn.stem == "pooled":
        return [*_activated(cnn, images, width, 7, 2), pool]
    half = rounded(width / 2, 8)
    return [
        *_activated(cnn, images, half, 3, 2),
        *_activated(cnn, half, half, 3),
        *_activated(cnn, half, width, 3),
        pool,
    ]


def _halving(cnn: CnnArchitecture, channels: int, width: int) -> tuple[Modules, int, int]:
    """The transition between two stages: its modules, the channels after it, and the stride of the
    next block."""
    pools: dict[str, Modules] = {"max_pool": [nn.MaxPool2d(2)], "avg_pool": [nn.AvgPool2d(2)]}
    pool = pools.get(cnn.downsampling, [])
    kernel_and_stride = (1, 1) if pool else (2, 2)
    if cnn.style == "dense":  # DenseNet halves the channels here
        kept = rounded(channels / 2, 8)
        squeeze = _conv(cnn, channels, kept, *kernel_and_stride)
        return [*_leading_norm_act(cnn, channels), squeeze, *pool], kept, 1
    if cnn.style == "convnext":
        widen = nn.Conv2d(channels, width, *kernel_and_stride)
        return [*_norm(cnn, channels), *pool, widen], width, 1
    return pool, channels, 1 if pool else 2


def _stage(
    cnn: CnnArchitecture, channels: int, width: int, depth: int, stride: int = 1
) -> tuple[Blocks, int]:
    """The blocks of a stage, and its output channels."""
    make = _BLOCKS[cnn.style]
    if cnn.style == "dense":
        dense = (make(cnn, channels + index * width, width, 1) for index in range(depth))
        return Blocks(*dense), channels + depth * width
    first = make(cnn, channels, width, stride)
    return Blocks(first, *repeated(lambda: make(cnn, width, width, 1), depth - 1)), width


def _head(cnn: CnnArchitecture, channels: int) -> Modules:
    side = 1
    widths = [channels]
    if cnn.head == "hidden":
        widths.append(min(MAX_HIDDEN, 2 * channels))
    elif cnn.head == "flattened":
        side = min(FLATTENED_SIDE, max(1, cnn.image_size // cnn.reduction))
        widths = [side * side * channels, *[min(MAX_HIDDEN, 8 * channels)] * 2]
    parts: Modules = [nn.Sequential(nn.AdaptiveAvgPool2d(side), nn.Flatten())]
    for inputs, hidden in itertools.pairwise(widths):
        parts += [nn.Linear(inputs, hidden), _activation(cnn), *_dropout(cnn.head_dropout)]
    if cnn.head == "linear":
        parts += _dropout(cnn.head_dropout)
    return [*parts, nn.Linear(widths[-1], cnn.classes)]


def _level(cnn: CnnArchitecture, index: int, channels: int, stride: int) -> nn.Module:
    """The levels from ``index`` down, from ``channels`` to the width of stage ``index``."""
    width, depth = cnn.widths[index], cnn.depths[index]
    encoder, _ = _stage(cnn, channels, width, depth, stride)
    if index + 1 == len(cnn.widths):
        return encoder
    deeper = cnn.widths[index + 1]
    down, _, below_stride = _halving(cnn, width, deeper)
    below = nn.Sequential(
        *down, _level(cnn, index + 1, width, below_stride), *_doubling(cnn, deeper, width)
    )
    if cnn.style == "unet":
        return Level(encoder, below, None, _stage(cnn, 2 * width, width, 1)[0])
    return Level(encoder, below, _stage(cnn, width, width, 1)[0], _stage(cnn, width, width, 1)[0])


def _doubling(cnn: CnnArchitecture, inputs: int, outputs: int) -> Modules:
    if cnn.upsampling == "conv_transpose":
        return [nn.ConvTranspose2d(inputs, outputs, 2, stride=2)]
    parts: Modules = [nn.Upsample(scale_factor=2, mode=cnn.upsampling)]
    if inputs != outputs:
        parts += _normed(cnn, inputs, outputs)
    return parts


def _plain(cnn: CnnArchitecture, inputs: int, width: int, stride: int) -> nn.Module:
    conv = _activated(cnn, inputs, width, cnn.kernel, stride, cnn.groups)
    return nn.Sequential(*conv, *_ending(cnn, width))


def _basic(cnn: CnnArchitecture, inputs: int, width: int, stride: int) -> nn.Module:
    branch = nn.Sequential(
        *_activated(cnn, inputs, width, cnn.kernel, stride, cnn.groups),
        *_normed(cnn, width, width, cnn.kernel, 1, cnn.groups),
        *_ending(cnn, width),
    )
    return _summed(cnn, branch, inputs, width, stride)


def _bottleneck(cnn: CnnArchitecture, inputs: int, width: int, stride: int) -> nn.Module:
    inner = rounded(width / cnn.expansion, granule_of(cnn.groups))
    branch = nn.Sequential(
        *_activated(cnn, inputs, inner),
        *_activated(cnn, inner, inner, cnn.kernel, stride, cnn.groups),
        *_normed(cnn, inner, width),
        *_ending(cnn, width),
    )
    return _summed(cnn, branch, inputs, width, stride)


def _summed(
    cnn: CnnArchitecture, branch: nn.Module, inputs: int, width: int, stride: int
) -> nn.Module:
    """The branch added to its input, which is projected where the map changes, and activated."""
    shortcut = None
    if inputs != width or stride != 1:
        shortcut = nn.Sequential(*_normed(cnn, inputs, width, 1, stride))
    return nn.Sequential(Residual(branch, shortcut), _activation(cnn))


def _dense(cnn: CnnArchitecture, inputs: int, width: int, stride: int) -> nn.Module:
    inner = width * cnn.expansion
    branch = nn.Sequential(
        *_leading_norm_act(cnn, inputs),
        *_activated(cnn, inputs, inner),
        _conv(cnn, inner, width, cnn.kernel, stride, cnn.groups),
        *_ending(cnn, width),
    )
    return Concatenated(branch)


def _inverted_residual(cnn: CnnArchitecture, inputs: int, width: int, stride: int) -> nn.Module:
    hidden = inputs * cnn.expansion
    expanded: Modules = []
    if cnn.expansion > 1:
        expanded = _activated(cnn, inputs, hidden, 1, 1, cnn.groups)
    branch = nn.Sequential(
        *expanded,
        *_activated(cnn, hidden, hidden, cnn.kernel, stride, hidden),
        *_gate(cnn, hidden),
        *_normed(cnn, hidden, width, 1, 1, cnn.groups),
        *_dropout(cnn.block_dropout),
    )
    return Residual(branch) if inputs == width and stride == 1 else branch


def _separable(cnn: CnnArchitecture, inputs: int, width: int, stride: int) -> nn.Module:
    return nn.Sequential(
        *_activated(cnn, inputs, inputs, cnn.kernel, stride, inputs),
        *_activated(cnn, inputs, width, 1, 1, cnn.groups),
        *_ending(cnn, width),
    )


def _convnext(cnn: CnnArchitecture, inputs: int, width: int, stride: int) -> nn.Module:
    hidden = width * cnn.expansion
    if cnn.norm == "layer_norm":
        mlp: Modules = [PixelMlp(width, hidden, _activation(cnn))]
    else:
        widen, narrow = nn.Conv2d(width, hidden, 1), nn.Conv2d(hidden, width, 1)
        mlp = [*_norm(cnn, width), widen, _activation(cnn), narrow]
    depthwise = nn.Conv2d(width, width, cnn.kernel, 1, cnn.kernel // 2, groups=width)
    branch = [depthwise, *mlp, *_gate(cnn, width), Scale(width), *_dropout(cnn.block_dropout)]
    return Residual(nn.Sequential(*branch))


def _double(cnn: CnnArchitecture, inputs: int, width: int, stride: int) -> nn.Module:
    return nn.Sequential(
        *_activated(cnn, inputs, width, cnn.kernel, stride, cnn.groups),
        *_activated(cnn, width, width, cnn.kernel, 1, cnn.groups),
        *_ending(cnn, width),
    )


_BLOCKS: Final[Mapping[str, Callable[[CnnArchitecture, int, int, int], nn.Module]]] = {
    "plain": _plain,
    "basic": _basic,
    "bottleneck": _bottleneck,
    "dense": _dense,
    "inverted_residual": _inverted_residual,
    "separable": _separable,
    "convnext": _convnext,
    "unet": _double,
    "hourglass": _bottleneck,
}
"""Style → its block, from the architecture, input channels, the stage's width and the stride."""


def _conv(
    cnn: CnnArchitecture,
    inputs: int,
    outputs: int,
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
) -> nn.Conv2d:
    """A convolution; it has a bias unless a norm follows, which would cancel it.

    A patch (kernel = stride) is not padded; everything else keeps the map's side over the stride.
    """
    padding = 0 if kernel == stride else kernel // 2
    return nn.Conv2d(
        inputs, outputs, kernel, stride, padding, groups=groups, bias=cnn.norm == "none"
    )


def _normed(cnn: CnnArchitecture, inputs: int, outputs: int, *shape: int) -> Modules:
    """A convolution, of which ``shape`` gives kernel, stride and groups, and its norm."""
    return [_conv(cnn, inputs, outputs, *shape), *_norm(cnn, outputs)]


def _activated(cnn: CnnArchitecture, inputs: int, outputs: int, *shape: int) -> Modules:
    """A convolution, its norm and an activation."""
    return [*_normed(cnn, inputs, outputs, *shape), _activation(cnn)]


def _norm(cnn: CnnArchitecture, channels: int) -> Modules:
    """The network's norm, if it has one."""
    if cnn.norm == "batch_norm":
        return [nn.BatchNorm2d(channels)]
    if cnn.norm == "group_norm":
        return [nn.GroupNorm(math.gcd(MAX_NORM_GROUPS, channels), channels)]
    return [ChannelNorm(channels)] if cnn.norm == "layer_norm" else []


def _activation(cnn: CnnArchitecture, in_place: bool = True) -> nn.Module:
    """The network's activation, which overwrites its input where the network and the place allow
    it."""
    if cnn.activation == "gelu":
        return nn.GELU()
    return activation_class(cnn.activation)(inplace=cnn.in_place and in_place)


def _leading_norm_act(cnn: CnnArchitecture, channels: int) -> Modules:
    """Norm and activation before a convolution; without a norm the activation is not in place,
    because others read the input."""
    return [*_norm(cnn, channels), _activation(cnn, in_place=cnn.norm != "none")]


def _ending(cnn: CnnArchitecture, channels: int) -> Modules:
    """The end of a block's branch: gate and dropout."""
    return [*_gate(cnn, channels), *_dropout(cnn.block_dropout)]


def _gate(cnn: CnnArchitecture, channels: int) -> Modules:
    return [SqueezeExcitation(channels, _activation(cnn))] if cnn.squeeze_excitation else []


def _dropout(probability: float) -> Modules:
    return [nn.Dropout(probability)] if probability else []
