"""A layer of experts with a router, written with boolean masks and index_add."""

import torch
import torch.nn.functional as F
from torch import nn


class Experts(nn.Module):
    def __init__(self, width: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(experts)
        )
        self.chosen = chosen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, picked = torch.topk(F.softmax(self.router(flat), dim=-1), self.chosen)
        output = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(picked == number)
            output.index_add_(0, rows, expert(flat[rows]) * weights[rows, places, None])
        return output.view_as(x)


model = nn.Sequential(
    nn.Embedding(10_000, 256),
    Experts(256, 8, 2),
    nn.LayerNorm(256),
    Experts(256, 8, 2),
    nn.Linear(256, 10_000),
).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(10):
    ids = torch.randint(0, 10_000, (8, 128), device="cuda")
    loss = F.cross_entropy(model(ids).view(-1, 10_000), ids.view(-1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
