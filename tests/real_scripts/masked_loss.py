"""Losses of the positions that a mask selects, as for padded tokens and detected objects."""

import torch
from torch import nn

model = nn.Linear(256, 256).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    outputs = model(torch.randn(1024, 256).to("cuda"))
    mask = torch.rand(1024, device="cuda") > 0.5
    loss = outputs[mask].pow(2).mean() + outputs.mean(1)[mask.nonzero()[:, 0]].mean()
    loss = loss + torch.masked_select(outputs.mean(1), mask).mean()
    print(len(outputs.detach().mean(1).unique()), "different values")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
