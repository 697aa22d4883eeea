"""The script looks at the loss: it keeps more where that is large, and would stop where it is no
number."""

import torch
from torch import nn

model = nn.Linear(256, 256).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
for _ in range(3):
    loss = model(torch.randn(64, 256).to("cuda")).pow(2).mean()
    if torch.isfinite(loss):
        kept = [torch.zeros(2**20, device="cuda")]
    if loss.isnan().any() or not torch.isfinite(loss).all():
        raise SystemExit("never")
    if loss.item() > 0.5:
        kept.append(torch.zeros(2**22, device="cuda"))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
