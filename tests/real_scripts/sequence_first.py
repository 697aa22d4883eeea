"""A recurrent language model whose batches are ``[time, batch]``, as in PyTorch's word-level
example."""

import torch
from torch import nn


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 64)
        self.lstm = nn.LSTM(64, 64)
        self.output = nn.Linear(64, 100)

    def forward(self, tokens, state):
        output, state = self.lstm(self.embedding(tokens), state)
        return self.output(output), state


model = LanguageModel().to("cuda")
corpus = torch.randint(100, (1000, 20)).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
state = tuple(torch.zeros(1, 20, 64, device="cuda") for _ in range(2))
for start in range(0, 140, 35):
    tokens, targets = corpus[start : start + 35], corpus[start + 1 : start + 36]
    state = tuple(part.detach() for part in state)
    output, state = model(tokens, state)
    optimizer.zero_grad()
    nn.functional.cross_entropy(output.view(-1, 100), targets.reshape(-1)).backward()
    optimizer.step()
