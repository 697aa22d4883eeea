"""Convolutional networks: plain, residual, dense, inverted residual, separable, ConvNeXt-like,
U-Net and hourglass.

GPUMemNet's convolutional networks (arXiv 2602.17817, section 4) had neither residuals nor pooling;
these are the designs that people train.  Widths and depths are those of RegNet's design space
(Radosavovic et al., arXiv 2003.13678); :mod:`~dataset_builder.families.cnn_modules` builds the
networks and names the papers of their blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from . import Architecture, RoughSizes, TensorSpec, features

if TYPE_CHECKING:
    from torch import nn

FEATURES: Final = features("cnn")
DENSE_PREDICTION: Final = ("unet", "hourglass")
"""Styles that predict a class for every pixel."""
EXPANDING: Final = ("bottleneck", "dense", "inverted_residual", "convnext", "hourglass")
"""Styles whose blocks have a separate inner width."""
NO_IN_PLACE: Final = ("gelu",)
"""Activation functions that torch cannot run in place."""

GRANULE: Final = 8
"""Widths are multiples of this number, as tensor cores require."""
MAX_WIDTH: Final = 8192
MAX_NORM_GROUPS: Final = 32
"""Groups of a group norm, the default of its authors (Wu & He, arXiv 1803.08494); fewer where they do
not divide the channels."""
FLATTENED_SIDE: Final = 7
MAX_HIDDEN: Final = 4096
MIN_IMAGE_SIZE: Final = 32
STEM_REDUCTION: Final = {"conv": 1, "pooled": 4, "deep": 4, "patch": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class CnnArchitecture(Architecture):
    """Every parameter of a convolutional network on square images.

    Fields that a style does not use hold a fixed value, so that equal networks are equal
    architectures.

    Attributes:
        style: the kind of its blocks; the choices of all texts are in :data:`FEATURES`.
        image_size: side of the input in pixels.
        input_channels: channels of the input.
        classes: classes per image, or per pixel in :data:`DENSE_PREDICTION`.
        widths: output channels of the blocks of every stage; the growth rate where the style is
            ``dense``.
        depths: blocks of every stage.
        kernel: side of the spatial convolutions.
        groups: of the spatial convolutions, or of the pointwise ones where the spatial ones are
            depthwise (ShuffleNet); 1 in ``convnext``.
        expansion: ratio of a block's inner and outer width; 1 outside of :data:`EXPANDING`.
        stem: ``conv`` keeps the image's size, ``pooled`` (7 × 7 and max pooling), ``deep`` (three 3
            × 3 and max pooling) and ``patch`` (4 × 4 patches) leave a quarter of its side.
        downsampling: how the map is halved between stages.
        upsampling: how it is doubled again in :data:`DENSE_PREDICTION`; elsewhere ``none``.
        norm: ``layer_norm`` is over the channels of each pixel.
        activation: the activation function.
        in_place: whether activations overwrite their input where it is their own.
        squeeze_excitation: whether every block has a squeeze-excitation gate.
        block_dropout: dropout at the end of every block's branch; 0 leaves it out.
        head: ``linear`` on the pooled channels, ``hidden`` with a linear layer before it
            (MobileNetV3), ``flattened`` with two of them on a 7 × 7 map (VGG); ``per_pixel`` in
            :data:`DENSE_PREDICTION`.
        head_dropout: dropout before the last layer; 0 leaves it out.
    """

    style: str
    image_size: int
    input_channels: int
    classes: int
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    kernel: int
    groups: int
    expansion: int
    stem: str
    downsampling: str
    upsampling: str
    norm: str
    activation: str
    in_place: bool
    squeeze_excitation: bool
    block_dropout: float
    head: str
    head_dropout: float

    @property
    def reduction(self) -> int:
        """By how much stem and stages shrink the image's side."""
        return int(STEM_REDUCTION[self.stem] * 2 ** (len(self.widths) - 1))


ARCHITECTURE: Final = CnnArchitecture


def granule_of(groups: int) -> int:
    """The number that divides every width."""
    return math.lcm(GRANULE, groups)


def rounded(width: float, granule: int) -> int:
    """The multiple of ``granule`` nearest to ``width``, at least one."""
    return max(granule, int(width / granule + 0.5) * granule)


def spread(blocks: int, stages: int, profile: str) -> tuple[int, ...]:
    """Blocks of each stage, at least one: ``even``, ``middle`` (most in the last but one, as in
    ResNet) or ``late`` (growing)."""
    if profile == "even":
        weights = [1] * stages
    elif profile == "middle":
        weights = [3 if index == stages - 2 else 1 for index in range(stages)]
    else:
        weights = list(range(1, stages + 1))
    total = sum(weights)
    edges = [round(blocks * sum(weights[:index]) / total) for index in range(stages + 1)]
    return tuple(max(1, edges[index + 1] - edges[index]) for index in range(stages))


def compose(values: Mapping[str, Any]) -> CnnArchitecture:
    """The architecture for one value of every feature in :data:`FEATURES`.

    Kernels are made odd.  Widths go to the nearest multiple of 8 and of the groups, image sizes
    down to a multiple of 8 and, in dense prediction, of the network's reduction.  In dense
    prediction the number of classes is the square root of ``classes``.
    """
    rest = dict(values) | {"kernel": values["kernel"] | 1}
    width, widening, blocks, stages = (
        rest.pop(name) for name in ("width", "widening", "blocks", "stages")
    )
    profile = rest.pop("profile")
    style = rest["style"]
    if style == "convnext":
        rest["groups"] = 1
    if style not in EXPANDING:
        rest["expansion"] = 1
    if rest["activation"] in NO_IN_PLACE:
        rest["in_place"] = False
    multiple = GRANULE
    if style in DENSE_PREDICTION:
        rest["head"] = "per_pixel"
        rest["classes"] = max(2, round(rest["classes"] ** 0.5))
        multiple = max(GRANULE, STEM_REDUCTION[rest["stem"]] * 2 ** (stages - 1))
    else:
        rest["upsampling"] = "none"
    rest["image_size"] = max(multiple, MIN_IMAGE_SIZE, rest["image_size"] // multiple * multiple)
    granule = granule_of(rest["groups"])
    widths = tuple(
        rounded(min(width * widening**index, MAX_WIDTH), granule) for index in range(stages)
    )
    return CnnArchitecture(widths=widths, depths=spread(blocks, stages, profile), **rest)


def can_train(architecture: CnnArchitecture, batch_size: int) -> bool:
    """Whether the network trains: a map is left, and norms of a map of one pixel have more than one
    value."""
    cnn = architecture
    side = cnn.image_size // cnn.reduction
    if side != 1:
        return side > 1
    if cnn.norm == "batch_norm":
        return batch_size > 1
    return cnn.norm != "group_norm" or min(cnn.widths[-2:]) // cnn.expansion > MAX_NORM_GROUPS


def rough_sizes(architecture: CnnArchitecture) -> RoughSizes:
    """See :class:`~dataset_builder.families.RoughSizes`; a projection or a gate is left out."""
    cnn, spatial = architecture, architecture.kernel**2 / architecture.groups
    per_conv = 1 + (cnn.norm != "none") + (not cnn.in_place)
    per_pixel = cnn.style in DENSE_PREDICTION
    channels = (1 + (cnn.style == "dense")) * cnn.widths[0]
    side = cnn.image_size // STEM_REDUCTION[cnn.stem]
    pools = cnn.stem in ("pooled", "deep")  # after convolutions of maps of twice the side
    activations: float = (side * (1 + pools)) ** 2 * channels * (per_conv + (cnn.stem == "deep"))
    parameters = multiply_adds = 0.0
    for width, depth in zip(cnn.widths, cnn.depths, strict=True):
        if cnn.style == "dense":
            inputs, inner = channels + width * depth / 2, width * cnn.expansion
            weights = inputs * inner + spatial * inner * width
            outputs = (per_conv + 1) * (inputs + inner)
            channels = (channels + depth * width) // 2
        else:
            spatial_weights, pointwise_weights, widths = _ROUGH_BLOCKS[cnn.style](cnn.expansion)
            weights = (spatial * spatial_weights + pointwise_weights) * width**2
            outputs = per_conv * widths * width
            channels = width
        blocks = depth + 2 * per_pixel  # dense prediction has blocks on the way back, too
        parameters += blocks * weights
        activations += blocks * side**2 * outputs
        multiply_adds += blocks * side**2 * weights
        side = max(1, side // 2)
    logits = cnn.classes * (cnn.image_size**2 if per_pixel else 1)
    head = channels * cnn.classes
    if cnn.head == "hidden":
        head = (channels + cnn.classes) * min(MAX_HIDDEN, 2 * channels)
    elif cnn.head == "flattened":
        pooled = min(FLATTENED_SIDE, max(1, cnn.image_size // cnn.reduction)) ** 2
        hidden = min(MAX_HIDDEN, 8 * channels)
        head = (pooled * channels + hidden + cnn.classes) * hidden
    return RoughSizes(parameters + head, activations + logits, logits, multiply_adds + head)


_ROUGH_BLOCKS: Final[Mapping[str, Callable[[int], tuple[float, float, float]]]] = {
    "plain": lambda e: (1, 0, 1),
    **dict.fromkeys(("basic", "unet"), lambda e: (2, 0, 2)),
    **dict.fromkeys(("bottleneck", "hourglass"), lambda e: (1 / e**2, 2 / e, 1 + 2 / e)),
    "inverted_residual": lambda e: (0, 2 * e, 1 + 2 * e),
    "separable": lambda e: (0, 1, 2),
    "convnext": lambda e: (0, 2 * e, 2 + e),
}
"""Style → weights of spatial and of pointwise convolutions in squares of the width, and outputs of
convolutions in widths, of a block with an expansion."""


def build(architecture: CnnArchitecture) -> nn.Module:
    """The network on torch's current default device.

    It maps ``[batch, input_channels, image_size, image_size]`` to logits ``[batch, classes]``, or
    ``[batch, classes, image_size, image_size]`` in dense prediction.
    """
    from .cnn_modules import network

    return network(architecture)


def tensors(architecture: CnnArchitecture) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
    """One image; one class, or one for every pixel."""
    size = architecture.image_size
    per_pixel = (size, size) if architecture.style in DENSE_PREDICTION else ()
    return (TensorSpec((architecture.input_channels, size, size)),), TensorSpec(
        per_pixel, architecture.classes
    )
