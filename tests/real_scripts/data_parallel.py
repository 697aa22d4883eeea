"""``nn.DataParallel`` on the GPUs that there are, as in PyTorch's example for ImageNet."""

import torch
from torch import nn

model = nn.DataParallel(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(64, 256).cuda(non_blocking=True)).pow(2).mean().backward()
    optimizer.step()
