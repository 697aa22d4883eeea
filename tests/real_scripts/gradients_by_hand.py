"""Training with torch.autograd.grad and updates in place, as in meta-learning; parameters are a list."""

import torch
from torch import nn


class Learner(nn.Sequential):
    def parameters(self, recurse: bool = True) -> list[nn.Parameter]:
        return list(super().parameters(recurse))


model = Learner(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 10)).cuda()
for _ in range(100):
    x, y = torch.randn(128, 256).cuda(), torch.randint(0, 10, (128,)).cuda()
    loss = nn.functional.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, model.parameters())
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.sub_(0.1 * gradient)
