"""An encoder and a decoder of GRUs with attention, teacher forcing by chance, two optimizers."""

import random

import torch
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(5000, 256), nn.GRU(512, 256, batch_first=True)
        self.score, self.out = nn.Linear(256, 256), nn.Linear(256, 5000)

    def forward(self, token: torch.Tensor, hidden: torch.Tensor, memory: torch.Tensor) -> tuple:
        weights = torch.softmax(
            self.score(hidden[-1]).unsqueeze(1) @ memory.transpose(1, 2), dim=-1
        )
        output, hidden = self.recurrent(
            torch.cat([self.embedding(token), weights @ memory], dim=-1), hidden
        )
        return self.out(output), hidden


embedding, encoder, decoder = (
    nn.Embedding(5000, 256).to(device),
    nn.GRU(256, 256, batch_first=True).to(device),
    Decoder().to(device),
)
first = torch.optim.Adam([*embedding.parameters(), *encoder.parameters()])
second = torch.optim.Adam(decoder.parameters())
for _ in range(10):
    source, target = (
        torch.randint(0, 5000, (32, 20)).to(device),
        torch.randint(0, 5000, (32, 15)).to(device),
    )
    memory, hidden = encoder(embedding(source))
    token, outputs = torch.zeros(32, 1, dtype=torch.long, device=device), []
    forced = random.random() < 0.5
    for i in range(15):
        output, hidden = decoder(token, hidden, memory)
        outputs.append(output)
        token = target[:, i : i + 1] if forced else output.topk(1).indices.squeeze(-1).detach()
    loss = nn.functional.cross_entropy(torch.cat(outputs, dim=1).flatten(0, 1), target.flatten())
    first.zero_grad()
    second.zero_grad()
    loss.backward()
    first.step()
    second.step()
