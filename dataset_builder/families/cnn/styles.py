"""Whole networks from their blocks: stem, stages with halvings between them, head; or encoder and
decoder.

The stems and heads are those of VGG, ResNet, ResNet-D (arXiv 1812.01187), MobileNetV3 and ConvNeXt;
the two styles of dense prediction bring the map of classes back to the image's size, the stem's
part of it by interpolating the logits (DeepLab).
"""

from __future__ import annotations

from .architecture import DENSE_PREDICTION, STEM_REDUCTION, CnnArchitecture, rounded
from .blocks import BLOCKS, convolution, leading_norm_act, norm, norm_act
from .plan import (
    Activation,
    Chain,
    Conv,
    Dropout,
    Flat,
    Level,
    Linear,
    Part,
    Pool,
    Stack,
    UpConv,
    Upsample,
)

FLATTENED_SIDE = 7
MAX_HIDDEN = 4096


def plan_network(cnn: CnnArchitecture) -> Chain:
    """The parts of ``cnn`` in execution order."""
    if cnn.style in DENSE_PREDICTION:
        return _dense_prediction(cnn)
    return _classifier(cnn)


def _classifier(cnn: CnnArchitecture) -> Chain:
    stem_width = 2 * cnn.widths[0] if cnn.style == "dense" else cnn.widths[0]
    parts = list(_stem(cnn, stem_width))
    channels = stem_width
    for index, (width, depth) in enumerate(zip(cnn.widths, cnn.depths, strict=True)):
        stride = 1
        if index:
            halving, channels, stride = _halving(cnn, channels, width)
            parts += halving
        stack, channels = _stage(cnn, channels, width, depth, stride)
        parts.append(stack)
    if cnn.style == "dense":
        parts += leading_norm_act(cnn, channels)
    return Chain((*parts, *_head(cnn, channels)))


def _stem(cnn: CnnArchitecture, width: int) -> tuple[Part, ...]:
    if cnn.stem == "patch":
        return (convolution(cnn, cnn.input_channels, width, 4, 4), *norm(cnn, width))
    if cnn.stem == "conv":
        return (convolution(cnn, cnn.input_channels, width, 3), *norm_act(cnn, width))
    pool = Pool("max_pool", 3)
    if cnn.stem == "pooled":
        return (convolution(cnn, cnn.input_channels, width, 7, 2), *norm_act(cnn, width), pool)
    half = rounded(width / 2, 8)
    first = (convolution(cnn, cnn.input_channels, half, 3, 2), *norm_act(cnn, half))
    second = (convolution(cnn, half, half, 3), *norm_act(cnn, half))
    return (*first, *second, convolution(cnn, half, width, 3), *norm_act(cnn, width), pool)


def _halving(cnn: CnnArchitecture, channels: int, width: int) -> tuple[tuple[Part, ...], int, int]:
    """The transition between two stages: its parts, the channels after it, and the stride of the
    next block."""
    pool: tuple[Part, ...] = () if cnn.downsampling == "strided" else (Pool(cnn.downsampling),)
    if cnn.style == "dense":  # DenseNet halves the channels here
        kept = rounded(channels / 2, 8)
        squeeze = convolution(cnn, channels, kept, *((1, 1) if pool else (2, 2)))
        return (*leading_norm_act(cnn, channels), squeeze, *pool), kept, 1
    if cnn.style == "convnext":
        widen = Conv(channels, width, *((1, 1) if pool else (2, 2)), bias=True)
        return (*norm(cnn, channels), *pool, widen), width, 1
    return pool, channels, 1 if pool else 2


def _stage(
    cnn: CnnArchitecture, channels: int, width: int, depth: int, stride: int = 1
) -> tuple[Stack, int]:
    """The blocks of a stage, and its output channels."""
    make = BLOCKS[cnn.style]
    if cnn.style == "dense":
        return Stack(
            tuple(make(cnn, channels + index * width, width, 1) for index in range(depth))
        ), channels + depth * width
    first = make(cnn, channels, width, stride)
    rest = make(cnn, width, width, 1) if depth > 1 else first
    return Stack((first, *(rest,) * (depth - 1))), width


def _head(cnn: CnnArchitecture, channels: int) -> tuple[Part, ...]:
    dropout = (Dropout(cnn.head_dropout),) if cnn.head_dropout else ()
    activation = Activation(cnn.activation, cnn.in_place)
    if cnn.head == "linear":
        return (Flat(1), *dropout, Linear(channels, cnn.classes))
    if cnn.head == "hidden":
        hidden = min(MAX_HIDDEN, 2 * channels)
        return (
            Flat(1),
            Linear(channels, hidden),
            activation,
            *dropout,
            Linear(hidden, cnn.classes),
        )
    side = min(FLATTENED_SIDE, max(1, cnn.image_size // cnn.reduction))
    hidden = min(MAX_HIDDEN, 8 * channels)
    first = (Flat(side), Linear(side * side * channels, hidden), activation, *dropout)
    return (*first, Linear(hidden, hidden), activation, *dropout, Linear(hidden, cnn.classes))


def _dense_prediction(cnn: CnnArchitecture) -> Chain:
    width = cnn.widths[0]
    reduction = STEM_REDUCTION[cnn.stem]
    dropout = (Dropout(cnn.head_dropout),) if cnn.head_dropout else ()
    upsample = (Upsample(reduction, "bilinear"),) if reduction > 1 else ()
    head = (*dropout, Conv(width, cnn.classes, bias=True), *upsample)
    return Chain((*_stem(cnn, width), _level(cnn, 0, width, 1), *head))


def _level(cnn: CnnArchitecture, index: int, channels: int, stride: int) -> Part:
    """The levels from ``index`` down, from ``channels`` to the width of stage ``index``."""
    width, depth = cnn.widths[index], cnn.depths[index]
    encoder, _ = _stage(cnn, channels, width, depth, stride)
    if index + 1 == len(cnn.widths):
        return encoder
    down, _, below_stride = _halving(cnn, width, cnn.widths[index + 1])
    below = _level(cnn, index + 1, width, below_stride)
    up = _doubling(cnn, cnn.widths[index + 1], width)
    joined = 2 * width if cnn.style == "unet" else width
    decoder, _ = _stage(cnn, joined, width, 1)
    lateral = None if cnn.style == "unet" else _stage(cnn, width, width, 1)[0]
    join = "concatenate" if cnn.style == "unet" else "add"
    return Level(encoder, Chain((*down, below, *up)), lateral, join, decoder)


def _doubling(cnn: CnnArchitecture, inputs: int, outputs: int) -> tuple[Part, ...]:
    if cnn.upsampling == "conv_transpose":
        return (UpConv(inputs, outputs),)
    return (
        Upsample(2, cnn.upsampling),
        *((convolution(cnn, inputs, outputs), *norm(cnn, outputs)) if inputs != outputs else ()),
    )
