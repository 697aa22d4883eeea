"""The model is converted after it is on the GPU."""

import torch
from torch import nn

model = (
    nn.Sequential(nn.Conv2d(16, 256, 3), nn.BatchNorm2d(256), nn.ReLU(), nn.Conv2d(256, 256, 3))
    .cuda()
    .half()
)
model = model.to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    images = torch.randn(8, 16, 8, 8).to("cuda", torch.half).to(memory_format=torch.channels_last)
    optimizer.zero_grad()
    model(images).pow(2).mean().backward()
    optimizer.step()
