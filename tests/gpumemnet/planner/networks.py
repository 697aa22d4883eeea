"""Small networks of three kinds, each with dropout, whose blocks save tensors that are large enough
to be swapped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """A block of a transformer."""

    def __init__(
        self, width: int, causal: bool, *, heads: int = 2, attention_dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.heads, self.attention_dropout = heads, attention_dropout
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.causal = causal
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        query, key, value = (
            self.qkv(self.norm(x))
            .view(batch, tokens, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        share = self.attention_dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=share, is_causal=self.causal
        )
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, tokens, width)))
        out: Tensor = x + self.dropout(self.mlp(x))
        return out


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Attention(32, causal=True) for _ in range(4))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Residual(nn.Module):
    """A block of a ResNet; the momentum of its second batch norm is given, and ``None`` averages
    over all steps."""

    def __init__(self, channels: int, momentum: float | None = None) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norm1, self.norm2 = (
            nn.BatchNorm2d(channels),
            nn.BatchNorm2d(channels, momentum=momentum),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += x
        result: Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )
        self.layers = nn.Sequential(*(Residual(8) for _ in range(3)))
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.stem(x)))
        return out


class Stack(nn.Module):
    """Blocks between a stem and a head."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class UNet(nn.Module):
    """Its decoder takes keyword arguments, and what the encoder saves is used twice."""

    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
            self.mix = nn.Sequential(
                nn.Conv2d(16, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout2d(0.1)
            )

        def forward(self, x: Tensor, *, skipped: Tensor) -> Tensor:
            out: Tensor = self.mix(torch.cat([self.up(x), skipped], 1))
            return out

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.InstanceNorm2d(8, track_running_stats=True), nn.SiLU()
        )
        self.middle = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU()
        )
        self.up = UNet.Up()
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skipped = self.down(x)
        out: Tensor = self.head(self.up(self.middle(skipped), skipped=skipped))
        return out


class Network(NamedTuple):
    """A network, its units in the order of the forward pass, and the shape of its input; of
    integers if it takes tokens."""

    build: Callable[[], nn.Module]
    units: tuple[str, ...]
    shape: tuple[int, ...]
    takes_tokens: bool = False

    def batch(self) -> Any:
        return torch.randint(50, self.shape) if self.takes_tokens else torch.randn(self.shape)


NETWORKS = {
    "resnet": Network(ResNet, ("stem", *(f"layers.{n}" for n in range(3)), "head"), (4, 3, 32, 32)),
    "gpt": Network(Gpt, tuple(f"blocks.{n}" for n in range(4)), (4, 128), takes_tokens=True),
    "unet": Network(UNet, ("down", "middle", "up"), (2, 3, 32, 32)),
}
