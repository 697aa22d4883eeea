"""Models that read the values of their activations, each in its own way."""

import torch
from torch import nn


class Reads(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(8, 8), how

    def forward(self, x):
        x = self.layer(x)
        return getattr(self, self.how)(x)

    def item(self, x):
        return x / x.abs().max().item()

    def branch(self, x):
        if x.sum() > 0:
            return x
        return -x

    def length(self, x):
        longest = int(x.argmax(1).max())
        return x[:, : longest + 1]

    def rows(self, x):
        return x * x.detach().mean(0).tolist()[0]

    def numpy(self, x):
        return x + torch.from_numpy(x.detach().cpu().numpy()).to(x.device)

    def host(self, x):
        penalty = x.detach().cpu().square().mean()
        return x + penalty.to(x.device)

    def loop(self, x):
        largest = x.detach().max()
        while largest > 1:
            largest /= 2
        return x / largest

    def checked(self, x):
        if (x < 0).any():
            torch._assert(False, f"found {x.tolist()}")
        return x


def reads(how):
    return Reads(how), torch.zeros(4, 8)


def normalised():
    """Reads a value while the model is built, of a tensor that is too large to be real."""
    model = Reads("host")
    model.factor = torch.randn(300, 300).norm().item()
    return model, torch.zeros(4, 8)
