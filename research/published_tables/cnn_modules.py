"""The parts that published CNNs are made of; see :mod:`research.published_tables.cnn`."""

from __future__ import annotations

from torch import Tensor, nn


def convolution(
    given: int, channels: int, stride: int, activation: str, norm: bool, dropout: float
) -> nn.Sequential:
    """A convolution of 3 x 3 with its normalisation, activation and dropout."""
    layers: list[nn.Module] = [nn.Conv2d(given, channels, 3, stride, 1)]
    if norm:
        layers.append(nn.BatchNorm2d(channels))
    layers.append(getattr(nn, activation)())
    if dropout:
        layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


class ResidualUnit(nn.Module):
    """Two convolutions beside a shortcut, which is a convolution of 1 x 1 where the shape
    changes."""

    def __init__(
        self, given: int, channels: int, stride: int, activation: str, norm: bool, dropout: float
    ) -> None:
        super().__init__()
        self.first = convolution(given, channels, stride, activation, norm, dropout)
        self.second = convolution(channels, channels, 1, activation, norm, dropout)
        changes = given != channels or stride != 1
        projection: list[nn.Module] = [nn.Conv2d(given, channels, 1, stride)] if changes else []
        self.shortcut = nn.Sequential(
            *projection, *([nn.BatchNorm2d(channels)] if changes and norm else [])
        )

    def forward(self, images: Tensor) -> Tensor:
        """The sum; the shortcut goes first."""
        shortcut: Tensor = self.shortcut(images)
        summed: Tensor = self.second(self.first(images)) + shortcut
        return summed
