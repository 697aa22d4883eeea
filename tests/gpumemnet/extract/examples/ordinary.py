"""Small networks of ordinary kinds; each factory returns ``(model, inputs)``."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self, inner, drop=0.0):
        super().__init__()
        self.inner, self.drop_path = inner, StochasticDepth(drop)

    def forward(self, x):
        return x + self.drop_path(self.inner(x))


class StochasticDepth(nn.Module):
    def __init__(self, share):
        super().__init__()
        self.share = share

    def forward(self, x):
        noise = torch.empty(x.shape[0], *[1] * (x.ndim - 1), device=x.device).bernoulli_(
            1 - self.share
        )
        return x * noise


class WrittenGelu(nn.Module):
    def forward(self, x):
        return (
            0.5
            * x
            * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        )


class Attention(nn.Module):
    def __init__(self, width, heads, written):
        super().__init__()
        self.heads, self.written = heads, written
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        parts = self.inward(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        if self.written:
            y = F.softmax(query @ key.transpose(-2, -1) * 0.125, dim=-1) @ value
        else:
            y = F.scaled_dot_product_attention(query, key, value)
        return self.outward(y.transpose(1, 2).flatten(2))


def _encoder(written, activation):
    block = [nn.LayerNorm(128), Attention(128, 4, written)]
    mlp = [nn.LayerNorm(128), nn.Linear(128, 512), activation(), nn.Linear(512, 128)]
    return nn.Sequential(
        nn.Embedding(1000, 128),
        Residual(nn.Sequential(*block)),
        Residual(nn.Sequential(*mlp)),
        nn.Linear(128, 1000),
    )


def _ids(length=64):
    return torch.ones(8, length, dtype=torch.long)


def residual_cnn():
    inner = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.SiLU())
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(
        nn.ZeroPad2d(1), nn.Conv2d(3, 32, 3), Residual(inner, 0.1), *head
    ), torch.zeros(8, 3, 64, 64)


def language_model():
    return _encoder(False, nn.GELU), _ids()


def language_model_written_out():
    return _encoder(True, WrittenGelu), _ids()


def perceptron():
    return nn.Sequential(
        nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 10)
    ), torch.zeros(64, 256)
