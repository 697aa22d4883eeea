"""Trains a small language model, to be traced or run: a GPT of 124 million parameters on random
tokens.

``gpumemnet trace examples/train.py`` says what memory it takes; ``python
examples/train.py`` needs a GPU.
"""

import argparse

import torch
from torch import nn

VOCABULARY, WIDTH, HEADS, BLOCKS, TOKENS = 50257, 768, 12, 12, 1024


class LanguageModel(nn.Module):
    """Token and position embeddings, causal transformer blocks, and an output layer that shares the
    embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(TOKENS, WIDTH)
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            block, BLOCKS, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of shape ``[B, T, VOCABULARY]`` for tokens of shape ``[B, T]``."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        return self.output(self.blocks(x, mask=mask, is_causal=True))


def main() -> None:
    """Take some optimizer steps in bfloat16 autocast."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()

    model = LanguageModel().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(arguments.steps):
        tokens = torch.randint(VOCABULARY, (arguments.batch_size, TOKENS + 1)).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
