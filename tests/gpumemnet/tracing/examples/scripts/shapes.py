"""Needs values for a shape."""

import torch
from torch import nn

model = nn.Linear(8, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    rows = torch.rand(64, 8).cuda()
    model(rows[: len(torch.repeat_interleave(model(rows)[:, 0].long()))]).sum().backward()
    optimizer.step()
