"""A validation pass without ``torch.no_grad`` after each epoch: from the second epoch on there are
two graphs."""

import torch
from torch import nn

model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())]).to(
    "cuda"
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model.train()
    for _ in range(4):
        loss = model(torch.randn(4096, 256).to("cuda")).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    validation_loss = model(torch.randn(4096, 256).to("cuda")).pow(2).mean()
