"""A U-Net (arXiv 1505.04597, padded): five levels, skip connections, 21 classes for every pixel."""

import torch
from torch import nn


def double(channels_in, channels):
    layers = []
    for given in (channels_in, channels):
        layers += [
            nn.Conv2d(given, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, classes=21, width=64, depth=5):
        super().__init__()
        widths = [width * 2**level for level in range(depth)]
        self.down = nn.ModuleList(
            double(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.pool = nn.MaxPool2d(2)
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(b, a, 2, 2)
            for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.up = nn.ModuleList(
            double(b, a) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        skips = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.pool(x))
            skips.append(x)
        skips.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([skips.pop(), grow(x)], dim=1))
        return self.head(x)


def build(**sizes):
    return UNet(**sizes)
