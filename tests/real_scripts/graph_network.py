"""A graph convolution: nodes send to their neighbours along the edges, and a mask tells which nodes
have labels."""

import torch
from torch import nn

NODES, EDGES = 2000, 10_000
features = torch.randn(NODES, 128).to("cuda")
edges = torch.randint(0, NODES, (2, EDGES)).to("cuda")
labels = torch.randint(0, 7, (NODES,)).to("cuda")
labelled = (torch.arange(NODES) < 140).to("cuda")


class Convolution(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.linear = nn.Linear(before, after)

    def forward(self, x, edges):
        sources, targets = edges
        degree = torch.zeros(len(x), device=x.device).scatter_add_(
            0, targets, torch.ones(len(targets), device=x.device)
        )
        messages = self.linear(x).index_select(0, sources) / degree.clamp(min=1)[targets, None]
        return torch.zeros(len(x), messages.shape[1], device=x.device).index_add_(
            0, targets, messages
        )


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Convolution(128, 64), Convolution(64, 7)

    def forward(self, x, edges):
        return self.second(self.first(x, edges).relu(), edges)


model = Network().to("cuda")
optimizer = torch.optim.Adam(model.parameters())
for _ in range(3):
    scores = model(features, edges)[labelled]
    assert scores.shape == (140, 7)
    loss = nn.functional.cross_entropy(scores, labels[labelled])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
