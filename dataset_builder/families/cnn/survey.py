"""Lists the layers of a planned network, counts its multiply-adds, and checks that it can train,
without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from gpumemnet.job.layers import Layer
from gpumemnet.physics.saved_tensors import kept_in_place

from .plan import (
    Activation,
    Chain,
    Concatenated,
    Conv,
    Dropout,
    Flat,
    Level,
    Linear,
    Norm,
    Part,
    PixelMlp,
    Pool,
    Residual,
    Scale,
    SqueezeExcitation,
    Stack,
    UpConv,
    Upsample,
)

NORM_KINDS: Final = {
    "batch_norm": "batch_norm2d",
    "group_norm": "group_norm",
    "layer_norm": "layer_norm",
}


class ShapeError(ValueError):
    """A part cannot process its input map; the message states why."""


def _activation_kind(part: Activation) -> str:
    return kept_in_place(part.name) if part.in_place else part.name


class Survey:
    """Walks a plan in execution order.

    Attributes:
        layers: the layers so far.
        multiply_adds: multiply-add operations of one forward pass per sample.
        batch_norm_values: fewest values per sample and channel that a batch norm sees, if there is
            one.
        group_norm_values: fewest values per sample and group that a group norm sees, if there is
            one.

    Raises:
        ShapeError: from the constructor, when a map is too small or does not fit its partner.
    """

    def __init__(self, plan: Chain, channels: int, side: int) -> None:
        self.layers: list[Layer] = []
        self.multiply_adds = 0
        self.batch_norm_values: int | None = None
        self.group_norm_values: int | None = None
        self._channels = channels
        self._side = side
        self._chain(plan)

    @property
    def _elements(self) -> int:
        return self._channels * self._side * self._side

    def _chain(self, part: Chain) -> None:
        for each in part.parts:
            _READERS[type(each)](self, each)

    def _conv(self, part: Conv) -> None:
        inputs, outputs, kernel, stride, groups, bias = part
        side = (self._side + 2 * part.padding - kernel) // stride + 1
        if side < 1:
            raise ShapeError(
                f"a {kernel} × {kernel} patch does not fit into a map of {self._side} × {self._side} pixels"
            )
        self._channels, self._side = outputs, side
        weights = inputs // groups * kernel * kernel * outputs
        self.multiply_adds += weights * side * side
        self.layers.append(
            Layer("conv2d", outputs * side * side, weights + outputs if bias else weights)
        )

    def _up_conv(self, part: UpConv) -> None:
        weights = part.inputs * part.outputs * 4
        self.multiply_adds += weights * self._side * self._side
        self._side *= 2
        self._channels = part.outputs
        self.layers.append(Layer("conv_transpose2d", self._elements, weights + part.outputs))

    def _norm(self, part: Norm) -> None:
        values = self._side * self._side
        if part.kind == "batch_norm":
            self.batch_norm_values = min(values, self.batch_norm_values or values)
        elif part.kind == "group_norm":
            values *= part.channels // norm_groups(part.channels)
            self.group_norm_values = min(values, self.group_norm_values or values)
        self.layers.append(Layer(NORM_KINDS[part.kind], self._elements, 2 * part.channels))

    def _activation(self, part: Activation) -> None:
        self.layers.append(Layer(_activation_kind(part), self._elements))

    def _pool(self, part: Pool) -> None:
        if self._side < 2:
            raise ShapeError("pooling halves a map of one pixel")
        self._side = (self._side + 2 * part.padding - part.kernel) // 2 + 1
        self.layers.append(Layer(part.kind, self._elements))

    def _flat(self, part: Flat) -> None:
        self._side = part.side
        self.layers.append(Layer("adaptive_avg_pool", self._elements))
        self._channels, self._side = self._elements, 1

    def _linear(self, part: Linear) -> None:
        self._channels = part.outputs
        self.multiply_adds += part.inputs * part.outputs
        self.layers.append(Layer("linear", part.outputs, (part.inputs + 1) * part.outputs))

    def _dropout(self, part: Dropout) -> None:
        self.layers.append(Layer("dropout", self._elements))

    def _upsample(self, part: Upsample) -> None:
        self._side *= part.factor
        self.layers.append(Layer("upsample", self._elements))

    def _scale(self, part: Scale) -> None:
        self.layers.append(Layer("multiply", self._elements, part.channels))

    def _squeeze_excitation(self, part: SqueezeExcitation) -> None:
        channels, squeezed = part.channels, part.squeezed
        weights = channels * squeezed
        self.multiply_adds += 2 * weights
        self.layers += (
            Layer("adaptive_avg_pool", channels),
            Layer("conv2d", squeezed, weights + squeezed),
            Layer(_activation_kind(part.activation), squeezed),
            Layer("conv2d", channels, weights + channels),
            Layer("sigmoid", channels),
            Layer("multiply", self._elements),
        )

    def _pixel_mlp(self, part: PixelMlp) -> None:
        hidden = part.hidden * self._side * self._side
        weights = part.channels * part.hidden
        self.multiply_adds += 2 * weights * self._side * self._side
        self.layers += (
            Layer("layer_norm", self._elements, 2 * part.channels),
            Layer("linear", hidden, weights + part.hidden),
            Layer(_activation_kind(part.activation), hidden),
            Layer("linear", self._elements, weights + part.channels),
        )

    def _residual(self, part: Residual) -> None:
        channels, side = self._channels, self._side
        self._chain(part.branch)
        if part.shortcut:
            self._channels, self._side = channels, side
            self._chain(part.shortcut)
        self.layers.append(Layer("add", self._elements))

    def _concatenated(self, part: Concatenated) -> None:
        channels = self._channels
        self._chain(part.branch)
        self._channels += channels
        self.layers.append(Layer("concatenate", self._elements))

    def _stack(self, part: Stack) -> None:
        previous: Part | None = None
        first = last = multiply_adds = 0
        for block in part.blocks:
            if block is previous:  # a block that changes the map is never repeated
                self.layers += self.layers[first:last]
                self.multiply_adds += multiply_adds
                continue
            first, before = len(self.layers), self.multiply_adds
            channels, side = self._channels, self._side
            _READERS[type(block)](self, block)
            last, multiply_adds = len(self.layers), self.multiply_adds - before
            previous = block if (channels, side) == (self._channels, self._side) else None

    def _level(self, part: Level) -> None:
        self._stack(part.encoder)
        channels, side = self._channels, self._side
        self._chain(part.below)
        if (self._channels, self._side) != (channels, side):
            raise ShapeError(
                f"a map of {side} × {side} pixels comes back from below as {self._side} × {self._side}"
            )
        if part.lateral:
            self._stack(part.lateral)
        if part.join == "concatenate":
            self._channels *= 2
        self.layers.append(Layer(part.join, self._elements))
        self._stack(part.decoder)


def norm_groups(channels: int) -> int:
    """Groups of a group norm: 32, the default of its authors (Wu & He, arXiv 1803.08494), or as
    many as divide the channels."""
    groups = 32
    while channels % groups:
        groups //= 2
    return groups


_READERS: Final[Mapping[type[Any], Callable[[Survey, Any], None]]] = {
    Conv: Survey._conv,
    UpConv: Survey._up_conv,
    Norm: Survey._norm,
    Activation: Survey._activation,
    Pool: Survey._pool,
    Flat: Survey._flat,
    Linear: Survey._linear,
    Dropout: Survey._dropout,
    Upsample: Survey._upsample,
    Scale: Survey._scale,
    SqueezeExcitation: Survey._squeeze_excitation,
    PixelMlp: Survey._pixel_mlp,
    Chain: Survey._chain,
    Residual: Survey._residual,
    Concatenated: Survey._concatenated,
    Stack: Survey._stack,
    Level: Survey._level,
}
