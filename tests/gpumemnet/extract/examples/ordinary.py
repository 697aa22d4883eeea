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


class Patches(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)

    def forward(self, images):
        return self.patches(images).flatten(2).transpose(1, 2)


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(dim=1)


class TokenMix(nn.Module):
    def __init__(self, tokens):
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(tokens, 64), nn.GELU(), nn.Linear(64, tokens))

    def forward(self, x):
        return self.mix(x.transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding, self.recurrent = (
            nn.Embedding(1000, 64),
            kind(64, 128, 2, batch_first=True, bidirectional=True),
        )
        self.head = nn.Linear(256, 4)

    def forward(self, ids):
        return self.head(self.recurrent(self.embedding(ids))[0][:, -1])


class Masked(nn.Module):
    """Looks at the values of its mask, as the encoders of transformers do."""

    def __init__(self):
        super().__init__()
        self.embedding, self.attention, self.head = (
            nn.Embedding(1000, 64),
            Attention(64, 4, False),
            nn.Linear(64, 2),
        )

    def forward(self, ids, attention_mask):
        if not attention_mask.to(device=self.head.weight.device).bool().all():
            raise RuntimeError("no padding here")
        return self.head(self.attention(self.embedding(ids)).mean(dim=1))


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


def _images():
    return torch.zeros(8, 3, 64, 64)


def residual_cnn():
    inner = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.SiLU())
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(
        nn.ZeroPad2d(1), nn.Conv2d(3, 32, 3), Residual(inner, 0.1), *head
    ), _images()


def mixer():
    return nn.Sequential(
        Patches(128), Residual(TokenMix(16), 0.1), nn.LayerNorm(128), Mean(), nn.Linear(128, 10)
    ), _images()


def vision_transformer():
    block = nn.Sequential(nn.LayerNorm(128), Attention(128, 4, False))
    return nn.Sequential(Patches(128), Residual(block, 0.1), Mean(), nn.Linear(128, 10)), _images()


def language_model():
    return _encoder(False, nn.GELU), _ids()


def language_model_written_out():
    return _encoder(True, WrittenGelu), _ids()


def masked():
    return Masked(), {"ids": _ids(), "attention_mask": torch.ones(8, 64, dtype=torch.long)}


def lstm():
    return Recurrent(nn.LSTM), _ids()


def gru():
    return Recurrent(nn.GRU), _ids()


def sound():
    return nn.Sequential(
        nn.Conv1d(1, 64, 9), nn.GroupNorm(8, 64), nn.GELU(), nn.Conv1d(64, 8, 1)
    ), torch.zeros(8, 1, 4000)


def perceptron():
    return nn.Sequential(
        nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 10)
    ), torch.zeros(64, 256)
