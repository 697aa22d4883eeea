"""Needs values for a shape."""

import torch
from torch import nn

model = nn.Linear(8, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    rows = torch.rand(64, 8).cuda()
    model(rows[: len(model(rows).detach().to_sparse_bsr((1, 1)).values())]).sum().backward()
    optimizer.step()
