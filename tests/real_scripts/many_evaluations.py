"""A thousand evaluation batches before each step."""

import torch
from torch import nn

model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(20))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
runs = 0


def count(*_: object) -> None:
    """Count the passes that run."""
    global runs
    runs += 1


model.register_forward_pre_hook(count)
for _ in range(3):
    with torch.no_grad():
        losses = torch.stack([model(torch.rand(64, 256).cuda()).mean() for _ in range(1000)])
    assert runs < 20, runs
    optimizer.zero_grad()
    model(torch.rand(64, 256).cuda()).mean().backward()
    optimizer.step()
