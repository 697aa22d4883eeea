"""An embedding with sparse gradients, and the optimizer for them."""

import torch
from torch import nn

rows = nn.Embedding(10_000, 64, sparse=True).cuda()
head = nn.Linear(64, 10).cuda()
optimizers = torch.optim.SparseAdam(rows.parameters()), torch.optim.Adam(head.parameters())
for _ in range(4):
    numbers = torch.randint(0, 10_000, (128,)).cuda()
    loss = head(rows(numbers)).square().mean()
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
