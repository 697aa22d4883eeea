"""The script sets up the caching allocator in its first lines, as nanochat does."""

import os

os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
for size in (4000, 12000, 8000):
    model(torch.randn(size, 256, device="cuda")).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
