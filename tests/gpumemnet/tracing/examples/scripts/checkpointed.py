"""A causal transformer under bf16 with activation checkpointing, on a device that it asks for by
index."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (4, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        return x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5000, 256)
        self.blocks = nn.ModuleList(Block(256) for _ in range(6))
        self.head = nn.Linear(256, 5000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + torch.arange(tokens.shape[1], device=tokens.device)[None, :, None]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


model = torch.compile(Model().to(0, torch.bfloat16))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
while True:
    tokens = torch.randint(5000, (4, 512)).to(device="cuda")
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.isnan(loss)
    torch.save(model.state_dict(), "/nonexistent/model.pt")
