"""Models whose shapes depend on the values of their activations."""

import torch
from torch import nn


class Picks(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(256, 256), how

    def forward(self, x):
        x = self.layer(x)
        return getattr(self, self.how)(x)

    def nonzero(self, x):
        rows = x.sum(1).nonzero()
        return x[rows[:, 0]]

    def mask(self, x):
        return x[x > 0]

    def where(self, x):
        rows, columns = torch.where(x > 0)
        return x[rows, columns]

    def masked_select(self, x):
        return torch.masked_select(x, x > 0)

    def unique(self, x):
        _, inverse = torch.unique(x.argmax(1), return_inverse=True)
        return x[inverse]

    def repeat(self, x):
        return x.repeat_interleave(x.argmax(1), dim=0)

    def counts(self, x):
        return x.sum() * torch.bincount(x.argmax(1))


def picks(how):
    return Picks(how), torch.zeros(64, 256)
