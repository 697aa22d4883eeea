"""Factories and models that fail or leave."""

import sys
import time

import torch
from torch import nn


class Leaves(nn.Module):
    """Ends the program, or never ends, in the backward pass."""

    class Step(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, how):
            ctx.how = how
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if ctx.how == "exit":
                sys.exit("enough")
            while True:
                time.sleep(0.01)

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(8, 8), how

    def forward(self, x):
        return self.Step.apply(self.layer(x), self.how)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, image, text):
        return self.layer(image) + text


def leaves(how):
    return Leaves(how), torch.zeros(4, 8)


def raises():
    raise FileNotFoundError("no such checkpoint: weights.pt")


def mismatched():
    return Pair(), (torch.zeros(4, 8), torch.zeros(6, 8))
