import torch
from torch import nn

scales = torch.diag(1 / torch.rand(64).add(1)).to_sparse()
features = (scales @ torch.rand(64, 256)).cuda()
model = nn.Linear(256, 256).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(4):
    optimizer.zero_grad()
    model(features).sum().backward()
    optimizer.step()
