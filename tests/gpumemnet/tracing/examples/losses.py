"""Factories whose outputs or losses cannot be trained with, and one whose loss can."""

import torch
from torch import nn
from torch.nn import functional as F


class Says(nn.Module):
    """Gives something else than a tensor."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x):
        self.layer(x)
        return {"label": "cat"}


class Fixed(nn.Module):
    def forward(self, x):
        return x * 2


def per_sample(output):
    return (output - 1).square()


def detached(output):
    return output.detach().mean()


def wrong(output):
    return F.cross_entropy(output, torch.zeros(3, dtype=torch.long))


def margin(output):
    return F.relu(1 - output).mean()


def with_loss(loss):
    losses = {
        "cross_entropy": nn.CrossEntropyLoss(),
        "mse": nn.MSELoss(),
        "triplet": nn.TripletMarginLoss(),
        "text": "mse",
    }
    return nn.Linear(8, 4), torch.zeros(6, 8), losses.get(loss) or globals()[loss]


def says():
    return Says(), torch.zeros(6, 8)


def fixed():
    return Fixed(), torch.zeros(6, 8)


def frozen():
    return nn.Linear(8, 4).requires_grad_(False), torch.zeros(6, 8)
