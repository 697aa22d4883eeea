"""LBFGS decides by values whether it keeps an update; its history fills up over the steps."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)).to("cuda")
optimizer = torch.optim.LBFGS(model.parameters(), history_size=10)
batch = torch.randn(8, 256).to("cuda")


def closure():
    optimizer.zero_grad()
    loss = model(batch).pow(2).mean()
    loss.backward()
    return loss


for _ in range(14):
    optimizer.step(closure)
