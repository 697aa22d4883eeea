from torch import nn


def tiny():
    return nn.Linear(8, 5)
