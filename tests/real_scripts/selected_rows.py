"""Rows that a mask selects whose values are computed on the GPU, as for anchors that match an
object."""

import torch
from torch import nn

model = nn.Linear(256, 256).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    outputs = model(torch.randn(4096, 256, device="cuda"))
    kept = outputs[outputs.detach().mean(1) > 0]
    loss = kept.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
