"""Makes the torch modules of a planned network; they are registered in the order in which they
run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from .. import blocks
from . import plan
from .survey import norm_groups

_ACTIVATIONS: Final[Mapping[str, Callable[..., nn.Module]]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "leaky_relu": nn.LeakyReLU,
    "silu": nn.SiLU,
    "hardswish": nn.Hardswish,
    "elu": nn.ELU,
    "mish": nn.Mish,
}


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of each pixel of ``[batch, channels, height, width]``."""

    def forward(self, features: Tensor) -> Tensor:
        """The normalised map, in the shape of ``features``."""
        return super().forward(features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Scale(nn.Module):
    """One learned factor per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.full((channels, 1, 1), 1e-6))

    def forward(self, features: Tensor) -> Tensor:
        """``features`` times the factors."""
        return features * self.factor


class SqueezeExcitation(nn.Module):
    """Channels times a gate in [0, 1] that is computed from their means."""

    def __init__(self, channels: int, squeezed: int, activation: nn.Module) -> None:
        super().__init__()
        squeeze, excite = nn.Conv2d(channels, squeezed, 1), nn.Conv2d(squeezed, channels, 1)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), squeeze, activation, excite, nn.Sigmoid()
        )

    def forward(self, features: Tensor) -> Tensor:
        """The gated map."""
        gated: Tensor = features * self.gate(features)
        return gated


class PixelMlp(nn.Module):
    """Layer norm, linear, activation, linear on the channels of each pixel."""

    def __init__(self, channels: int, hidden: int, activation: nn.Module) -> None:
        super().__init__()
        first, second = nn.Linear(channels, hidden), nn.Linear(hidden, channels)
        self.layers = nn.Sequential(nn.LayerNorm(channels), first, activation, second)

    def forward(self, features: Tensor) -> Tensor:
        """``[batch, channels, height, width]`` to the same."""
        mixed: Tensor = self.layers(features.permute(0, 2, 3, 1))
        return mixed.permute(0, 3, 1, 2)


class Projected(nn.Module):
    """``branch(features) + shortcut(features)``."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, features: Tensor) -> Tensor:
        """The sum of both."""
        summed: Tensor = self.branch(features) + self.shortcut(features)
        return summed


class Concatenated(nn.Module):
    """``features`` with the channels of ``branch(features)`` after them."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, features: Tensor) -> Tensor:
        """All the channels."""
        return torch.cat((features, self.branch(features)), dim=1)


class Level(nn.Module):
    """A level of an encoder and decoder, see :class:`dataset_builder.families.cnn.plan.Level`."""

    def __init__(self, part: plan.Level) -> None:
        super().__init__()
        self.encoder = module(part.encoder)
        self.below = module(part.below)
        self.lateral = module(part.lateral) if part.lateral else None
        self.adds = part.join == "add"
        self.decoder = module(part.decoder)

    def forward(self, features: Tensor) -> Tensor:
        """The decoder's output, as large as the encoder's."""
        skipped = self.encoder(features)
        returned = self.below(skipped)
        if self.lateral is not None:
            skipped = self.lateral(skipped)
        decoded: Tensor = self.decoder(
            skipped + returned if self.adds else torch.cat((skipped, returned), dim=1)
        )
        return decoded


def module(part: plan.Part) -> nn.Module:
    """The module of ``part`` on torch's current default device."""
    return _MAKERS[type(part)](part)


def _conv(part: plan.Conv) -> nn.Module:
    return nn.Conv2d(
        part.inputs,
        part.outputs,
        part.kernel,
        part.stride,
        part.padding,
        groups=part.groups,
        bias=part.bias,
    )


def _norm(part: plan.Norm) -> nn.Module:
    if part.kind == "layer_norm":
        return ChannelNorm(part.channels)
    return (
        nn.BatchNorm2d(part.channels)
        if part.kind == "batch_norm"
        else nn.GroupNorm(norm_groups(part.channels), part.channels)
    )


def _activation(part: plan.Activation) -> nn.Module:
    return nn.GELU() if part.name == "gelu" else _ACTIVATIONS[part.name](inplace=part.in_place)


def _pool(part: plan.Pool) -> nn.Module:
    pools = {"max_pool": nn.MaxPool2d, "avg_pool": nn.AvgPool2d}
    return pools[part.kind](part.kernel, stride=2, padding=part.padding)


def _upsample(part: plan.Upsample) -> nn.Module:
    return nn.Upsample(scale_factor=part.factor, mode=part.mode)


def _residual(part: plan.Residual) -> nn.Module:
    branch = module(part.branch)
    return Projected(branch, module(part.shortcut)) if part.shortcut else blocks.Residual(branch)


_MAKERS: Final[Mapping[type[Any], Callable[[Any], nn.Module]]] = {
    plan.Conv: _conv,
    plan.UpConv: lambda part: nn.ConvTranspose2d(part.inputs, part.outputs, 2, stride=2),
    plan.Norm: _norm,
    plan.Activation: _activation,
    plan.Pool: _pool,
    plan.Flat: lambda part: nn.Sequential(nn.AdaptiveAvgPool2d(part.side), nn.Flatten()),
    plan.Linear: lambda part: nn.Linear(part.inputs, part.outputs),
    plan.Dropout: lambda part: nn.Dropout(part.probability),
    plan.Upsample: _upsample,
    plan.Scale: lambda part: Scale(part.channels),
    plan.SqueezeExcitation: lambda part: SqueezeExcitation(
        part.channels, part.squeezed, module(part.activation)
    ),
    plan.PixelMlp: lambda part: PixelMlp(part.channels, part.hidden, module(part.activation)),
    plan.Chain: lambda part: nn.Sequential(*map(module, part.parts)),
    plan.Residual: _residual,
    plan.Concatenated: lambda part: Concatenated(module(part.branch)),
    plan.Stack: lambda part: blocks.Blocks(*map(module, part.blocks)),
    plan.Level: Level,
}
