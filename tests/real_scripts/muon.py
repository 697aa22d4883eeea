"""Muon for the matrices and AdamW for the rest, as in modded-nanogpt."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to("cuda")
matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others)]
for _ in range(4):
    model(torch.randn(64, 256).to("cuda")).pow(2).mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad(set_to_none=True)
