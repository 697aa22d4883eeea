"""A thread moves batches to the GPU ahead of the training."""

import threading

import torch
from torch import nn

model = nn.Linear(512, 512).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
batches: list[torch.Tensor] = []
thread = threading.Thread(
    target=lambda: batches.extend(torch.randn(2048, 512).to("cuda") for _ in range(3))
)
thread.start()
thread.join()
for batch in batches:
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
