"""Builds the block of every style: residual, dense, separable and so on.

Sources: VGG (arXiv 1409.1556), ResNet (1512.03385) and ResNeXt (1611.05431), DenseNet (1608.06993),
    MobileNet (1704.04861),
MobileNetV2 (1801.04381) and V3 (1905.02244), ShuffleNet's grouped pointwise convolutions
(1707.01083), ConvNeXt (2201.03545), U-Net (1505.04597).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from .architecture import CnnArchitecture, granule_of, rounded
from .plan import (
    Activation,
    Chain,
    Concatenated,
    Conv,
    Dropout,
    Norm,
    Part,
    PixelMlp,
    Residual,
    Scale,
    SqueezeExcitation,
)

BlockMaker = Callable[[CnnArchitecture, int, int, int], Part]
"""From the architecture, input channels, the stage's width and the stride to a block."""


def convolution(
    cnn: CnnArchitecture,
    inputs: int,
    outputs: int,
    kernel: int = 1,
    stride: int = 1,
    groups: int = 1,
) -> Conv:
    """A convolution; it has a bias unless a norm follows, which would cancel it."""
    return Conv(inputs, outputs, kernel, stride, groups, bias=cnn.norm == "none")


def norm(cnn: CnnArchitecture, channels: int) -> tuple[Part, ...]:
    """The network's norm, if it has one."""
    return () if cnn.norm == "none" else (Norm(cnn.norm, channels),)


def norm_act(cnn: CnnArchitecture, channels: int) -> tuple[Part, ...]:
    """Norm and activation after a convolution, whose output has no other use."""
    return (*norm(cnn, channels), Activation(cnn.activation, cnn.in_place))


def leading_norm_act(cnn: CnnArchitecture, channels: int) -> tuple[Part, ...]:
    """Norm and activation before a convolution; without a norm the activation is not in place,
    because others read the input."""
    return (*norm(cnn, channels), Activation(cnn.activation, cnn.in_place and cnn.norm != "none"))


def _ending(cnn: CnnArchitecture, channels: int) -> tuple[Part, ...]:
    """The end of a block's branch: gate and dropout."""
    dropout = (Dropout(cnn.block_dropout),) if cnn.block_dropout else ()
    return (*_gate(cnn, channels), *dropout)


def _gate(cnn: CnnArchitecture, channels: int) -> tuple[Part, ...]:
    if not cnn.squeeze_excitation:
        return ()
    return (SqueezeExcitation(channels, channels // 4, Activation(cnn.activation, cnn.in_place)),)


def _shortcut(cnn: CnnArchitecture, inputs: int, outputs: int, stride: int) -> Chain | None:
    if inputs == outputs and stride == 1:
        return None
    return Chain((convolution(cnn, inputs, outputs, 1, stride), *norm(cnn, outputs)))


def _plain(cnn: CnnArchitecture, inputs: int, width: int, stride: int) -> Part:
    conv = convolution(cnn, inputs, width, cnn.kernel, stride, cnn.groups)
    return Chain((conv, *norm_act(cnn, width), *_ending(cnn, width)))


def _basic(cnn: CnnArchitecture, inputs: int, width: int, stride: int) -> Part:
    branch = (
        *(convolution(cnn, inputs, width, cnn.kernel, stride, cnn.groups), *norm_act(cnn, width)),
        *(convolution(cnn, width, width, cnn.kernel, 1, cnn.groups), *norm(cnn, width)),
        *_ending(cnn, width),
    )
    residual = Residual(Chain(branch), _shortcut(cnn, inputs, width, stride))
    return Chain((residual, Activation(cnn.activation, cnn.in_place)))


def _bottleneck(cnn: CnnArchitecture, inputs: int, width: int, stride: int) -> Part:
    inner = rounded(width / cnn.expansion, granule_of(cnn.groups))
    branch = (
        *(convolution(cnn, inputs, inner), *norm_act(cnn, inner)),
        *(convolution(cnn, inner, inner, cnn.kernel, stride, cnn.groups), *norm_act(cnn, inner)),
        *(convolution(cnn, inner, width), *norm(cnn, width)),
        *_ending(cnn, width),
    )
    residual = Residual(Chain(branch), _shortcut(cnn, inputs, width, stride))
    return Chain((residual, Activation(cnn.activation, cnn.in_place)))


def _dense(cnn: CnnArchitecture, inputs: int, width: int, stride: int) -> Part:
    inner = width * cnn.expansion
    branch = (
        *(*leading_norm_act(cnn, inputs), convolution(cnn, inputs, inner)),
        *(*norm_act(cnn, inner), convolution(cnn, inner, width, cnn.kernel, stride, cnn.groups)),
        *_ending(cnn, width),
    )
    return Concatenated(Chain(branch))


def _inverted_residual(cnn: CnnArchitecture, inputs: int, width: int, stride: int) -> Part:
    hidden = inputs * cnn.expansion
    expanded = (
        (convolution(cnn, inputs, hidden, 1, 1, cnn.groups), *norm_act(cnn, hidden))
        if cnn.expansion > 1
        else ()
    )
    dropout = (Dropout(cnn.block_dropout),) if cnn.block_dropout else ()
    branch = (
        *expanded,
        *(convolution(cnn, hidden, hidden, cnn.kernel, stride, hidden), *norm_act(cnn, hidden)),
        *_gate(cnn, hidden),
        *(convolution(cnn, hidden, width, 1, 1, cnn.groups), *norm(cnn, width)),
        *dropout,
    )
    return Residual(Chain(branch)) if inputs == width and stride == 1 else Chain(branch)


def _separable(cnn: CnnArchitecture, inputs: int, width: int, stride: int) -> Part:
    depthwise = convolution(cnn, inputs, inputs, cnn.kernel, stride, inputs)
    pointwise = convolution(cnn, inputs, width, 1, 1, cnn.groups)
    return Chain(
        (depthwise, *norm_act(cnn, inputs), pointwise, *norm_act(cnn, width), *_ending(cnn, width))
    )


def _convnext(cnn: CnnArchitecture, inputs: int, width: int, stride: int) -> Part:
    hidden = width * cnn.expansion
    activation = Activation(cnn.activation, cnn.in_place)
    if cnn.norm == "layer_norm":
        mlp: tuple[Part, ...] = (PixelMlp(width, hidden, activation),)
    else:
        mlp = (
            *norm(cnn, width),
            Conv(width, hidden, bias=True),
            activation,
            Conv(hidden, width, bias=True),
        )
    branch = (
        Conv(width, width, cnn.kernel, 1, width, bias=True),
        *mlp,
        *_gate(cnn, width),
        Scale(width),
    )
    dropout = (Dropout(cnn.block_dropout),) if cnn.block_dropout else ()
    return Residual(Chain((*branch, *dropout)))


def _double(cnn: CnnArchitecture, inputs: int, width: int, stride: int) -> Part:
    first = (convolution(cnn, inputs, width, cnn.kernel, stride, cnn.groups), *norm_act(cnn, width))
    second = (convolution(cnn, width, width, cnn.kernel, 1, cnn.groups), *norm_act(cnn, width))
    return Chain((*first, *second, *_ending(cnn, width)))


BLOCKS: Final[Mapping[str, BlockMaker]] = {
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
"""Style → its block."""
