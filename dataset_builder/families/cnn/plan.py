"""The parts of a planned convolutional network, as plain data.

A style (:mod:`~dataset_builder.families.cnn.styles`) turns an architecture into a tree of these
parts; one function lists the layers without torch, another makes the modules, both from the same
tree.  Maps are square and named by their side.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Conv(NamedTuple):
    """A 2-d convolution; a patch (kernel = stride) is not padded, everything else keeps the map's
    side over the stride."""

    inputs: int
    outputs: int
    kernel: int = 1
    stride: int = 1
    groups: int = 1
    bias: bool = False

    @property
    def padding(self) -> int:
        """Pixels on every edge."""
        return 0 if self.kernel == self.stride else self.kernel // 2


class UpConv(NamedTuple):
    """A transposed 2 × 2 convolution with stride 2 and bias, as in the U-Net (Ronneberger et al.,
    arXiv 1505.04597)."""

    inputs: int
    outputs: int


class Norm(NamedTuple):
    """``batch_norm``, ``group_norm`` or, over the channels of each pixel, ``layer_norm``."""

    kind: str
    channels: int


class Activation(NamedTuple):
    """A non-linearity, which may overwrite its input."""

    name: str
    in_place: bool = False


class Pool(NamedTuple):
    """``max_pool`` or ``avg_pool`` with stride 2."""

    kind: str
    kernel: int = 2

    @property
    def padding(self) -> int:
        """Pixels on every edge."""
        return (self.kernel - 1) // 2


class Flat(NamedTuple):
    """Average pooling to ``side`` × ``side`` and flattening to a vector."""

    side: int


class Linear(NamedTuple):
    """A linear layer with bias, on a vector."""

    inputs: int
    outputs: int


class Dropout(NamedTuple):
    """Dropout of single elements."""

    probability: float


class Upsample(NamedTuple):
    """Interpolation, ``nearest`` or ``bilinear``."""

    factor: int
    mode: str


class Scale(NamedTuple):
    """One learned factor per channel, the layer scale of ConvNeXt (Liu et al., arXiv
    2201.03545)."""

    channels: int


class SqueezeExcitation(NamedTuple):
    """Channels gated by their own means (Hu et al., arXiv 1709.01507)."""

    channels: int
    squeezed: int
    activation: Activation


class PixelMlp(NamedTuple):
    """Layer norm and two linear layers on the channels of each pixel, in NHWC as ConvNeXt has
    them."""

    channels: int
    hidden: int
    activation: Activation


class Chain(NamedTuple):
    """A sequence of parts."""

    parts: tuple[Part, ...]


class Residual(NamedTuple):
    """``shortcut(x) + branch(x)``, the branch first; the shortcut is the input itself unless it is
    given."""

    branch: Chain
    shortcut: Chain | None = None


class Concatenated(NamedTuple):
    """``branch(x)`` after the channels of ``x`` (Huang et al., arXiv 1608.06993)."""

    branch: Chain


class Stack(NamedTuple):
    """A sequence of blocks: the units that activation checkpointing recomputes."""

    blocks: tuple[Part, ...]


class Level(NamedTuple):
    """One level of an encoder and decoder: the decoder takes the encoder's output joined with the
    output of the deeper levels.

    Attributes:
        encoder: runs first.
        below: goes down, through the deeper levels, and up again to the same map.
        lateral: what the encoder's output passes through before it is joined.
        join: ``concatenate`` (U-Net) or ``add`` (hourglass; Newell et al., arXiv 1603.06937).
        decoder: runs last.
    """

    encoder: Stack
    below: Chain
    lateral: Stack | None
    join: str
    decoder: Stack


Part: TypeAlias = (
    Conv
    | UpConv
    | Norm
    | Activation
    | Pool
    | Flat
    | Linear
    | Dropout
    | Upsample
    | Scale
    | SqueezeExcitation
    | PixelMlp
    | Chain
    | Residual
    | Concatenated
    | Stack
    | Level
)
