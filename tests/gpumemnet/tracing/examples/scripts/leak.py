"""Keeps every output, as beginners do; with --mended it does not."""

import sys

import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 4096), nn.Tanh(), nn.Linear(4096, 4096)).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for _ in range(5):
    inputs = torch.rand(256, 512).to("cuda")
    outputs = model(inputs)
    loss = outputs.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(float(outputs.sum()) if "--mended" in sys.argv else outputs)
