"""A confusion matrix of predictions by counting, and experts as a product of groups in fp32."""

import torch
from torch import nn

layer, experts = nn.Linear(64, 64).cuda(), nn.Parameter(torch.randn(4, 64, 32, device="cuda"))
optimizer = torch.optim.SGD([*layer.parameters(), experts], lr=0.1)
counts = torch.zeros(10, 10, dtype=torch.long, device="cuda")
for _ in range(3):
    x, labels = torch.randn(256, 64).cuda(), torch.randint(0, 10, (256,)).cuda()
    ends = torch.tensor([64, 128, 192, 256], dtype=torch.int32, device="cuda")
    output = nn.functional.grouped_mm(layer(x), experts, offs=ends)
    loss = nn.functional.cross_entropy(output, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    found = (9 * output[:, 0].sigmoid()).long()
    counts += torch.bincount(10 * labels + found, minlength=100).reshape(10, 10)
