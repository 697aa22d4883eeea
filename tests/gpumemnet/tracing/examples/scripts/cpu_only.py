"""Never goes to a GPU."""

import torch
from torch import nn

model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100):
    model(torch.rand(4, 8)).sum().backward()
    optimizer.step()
