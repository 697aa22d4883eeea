"""The whole training step runs in the optimizer's closure, as in Lightning."""

import torch
from torch import nn

model = nn.Sequential(
    nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 8)
).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    batch = torch.randn(1024, 64).to("cuda")

    def closure(batch=batch):
        loss = model(batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        return loss

    optimizer.step(closure)
