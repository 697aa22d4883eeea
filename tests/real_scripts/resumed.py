"""Training goes on from a checkpoint: the optimizer's state comes from the host."""

import torch
from torch import nn

model = nn.Linear(512, 512).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
states = [
    {"step": torch.tensor(7.0), "exp_avg": torch.zeros(shape), "exp_avg_sq": torch.zeros(shape)}
    for shape in ((512, 512), (512,))
]
optimizer.load_state_dict({**optimizer.state_dict(), "state": dict(enumerate(states))})
for _ in range(3):
    model(torch.randn(16, 512).to("cuda")).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
