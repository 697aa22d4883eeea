"""A validation pass without ``torch.no_grad``: its graph stays as long as its loss has a name."""

import torch
from torch import nn

model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.Tanh())]).to(
    "cuda"
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
validation_loss = model(torch.randn(4096, 256, device="cuda")).mean()
for _ in range(3):
    loss = model(torch.randn(4096, 256).to("cuda")).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
