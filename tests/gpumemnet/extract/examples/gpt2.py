"""GPT-2 small: 12 blocks, 768 wide, head tied to the token embedding; attention through the fused
function."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(self.ln_1(x)).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, vocabulary=50257, context=1024, width=768, depth=12, heads=12):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.drop(
            self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        )
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def build(**sizes):
    return GPT2(**sizes)


def build_with_tokens():
    return GPT2(), torch.zeros(4, 1024, dtype=torch.long)


def build_7b():
    return GPT2(vocabulary=50257, width=4096, depth=32, heads=32)
