"""Models that name devices, read values while they are built, or load weights, as real repositories
do."""

import os
import time

import numpy as np
import torch
from torch import nn


class DropPath(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if self.rate == 0.0:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.rate)
        return x * keep / (1 - self.rate)


class Stochastic(nn.Module):
    """Reads drop rates from a tensor while it is built, as vision backbones do."""

    def __init__(self, depth=4, width=256):
        super().__init__()
        rates = [rate.item() for rate in torch.linspace(0, 0.3, depth)]
        assert rates[0] == 0.0
        assert rates[-1] > 0.29
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in rates)
        self.paths = nn.ModuleList(DropPath(rate) for rate in rates)

    def forward(self, x):
        for layer, path in zip(self.layers, self.paths, strict=True):
            x = x + path(layer(x))
        return x


class Sinusoid(nn.Module):
    """A table from numpy, a constant on the CPU, and a mask that is read in the forward pass."""

    def __init__(self, tokens=512, width=64):
        super().__init__()
        angles = np.outer(np.arange(tokens), 1 / 10_000 ** (np.arange(width) / width))
        self.register_buffer("table", torch.from_numpy(np.sin(angles)).float())
        self.scale = torch.tensor([2.0], device="cpu")
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        steps = torch.arange(x.shape[1], device=x.device)
        if steps[0] == 0 and steps.max().item() == x.shape[1] - 1:
            x = x + self.table[steps] * self.scale.to(x.device)
        out = torch.zeros(x.shape, device=x.device)
        out[:, ::2] = self.layer(x)[:, ::2]
        return out


def constants():
    return nn.Sequential(Stochastic(width=64), Sinusoid())


def on_cuda(path: str):
    torch.set_default_device("cuda")
    model = nn.Sequential(
        nn.Linear(8, 600), nn.BatchNorm1d(600), nn.ReLU(), nn.Linear(600, 2)
    ).cuda()
    model.load_state_dict(torch.load(path))
    model.register_buffer("large", torch.zeros(200, 200, device="cuda:0"))
    return model.to("cuda", torch.float32), torch.zeros(4, 8).to(
        torch.device("cuda"), non_blocking=True
    )


def prints_and_forks():
    if os.fork() == 0:
        time.sleep(600)
    print("hello from the factory")
    os.write(1, b"hello from file descriptor 1\n")
    return nn.Linear(8, 4)


def transformed():
    lazy = nn.Sequential(nn.LazyLinear(600), nn.LazyBatchNorm1d())
    compiled = torch.compile(nn.Sequential(nn.ReLU(), nn.Linear(600, 4)))
    return nn.Sequential(
        lazy, compiled, torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    )
