"""Factories and models that fail, each in its own way."""

import os
import sys

import torch
from torch import nn


class Reads(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(8, 8), how

    def forward(self, x):
        x = self.layer(x)
        if self.how == "item":
            return x * x.max().item()
        if self.how == "branch":
            return x if x.sum() > 0 else -x
        if self.how == "nonzero":
            return x[x > 0]
        if self.how == "numpy":
            return torch.from_numpy(x.detach().cpu().numpy())
        if self.how == "exit":
            sys.exit(3)
        return x.reshape(3, 5, 7)


def reads(how):
    return Reads(how)


def raises():
    raise ValueError("no such backbone: resnet51")


def exits():
    sys.exit("bye")


def vanishes():
    print("about to vanish")
    sys.stdout.flush()
    os._exit(4)


def hangs():
    while True:
        pass


def hangs_stubbornly():
    while True:
        try:
            while True:
                pass
        except BaseException:
            continue


def crashes():
    os.abort()


def returns_three():
    return nn.Linear(8, 8), 1, sys.stdin.read()


def gives_inputs():
    return nn.Linear(8, 8), torch.zeros(4, 8)
