"""bitsandbytes' Adam8bit in a plain loop."""

import bitsandbytes as bnb
import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda()
optimizer = bnb.optim.Adam8bit(model.parameters(), lr=1e-3)
for _ in range(10):
    x = torch.randn(64, 1024, device="cuda")
    loss = (model(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
