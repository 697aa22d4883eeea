"""The torch modules of a published transformer, put together as the measured script did: PyTorch's
own encoder layers.

The layers are PyTorch's because the memory was: they keep what ``torch.nn.TransformerEncoderLayer``
keeps, not what blocks of our own would.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class EncoderClassifier(nn.Module):
    """Token embedding and learned positions, post-norm encoder layers with ReLU, the mean over the
    positions, a linear head.

    Attributes:
        embedding: tokens to vectors; its gradient is dense.
        positional_encoding: one vector for each position, zero at first, trained.
        encoder: the layers, none of them masked, so their attention weights are never asked for.
        head: vectors to classes.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int,
        depth: int,
        heads: int,
        feed_forward_width: int,
        dropout: float,
        length: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positional_encoding = nn.Parameter(torch.zeros(1, length, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, feed_forward_width, dropout, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, depth, enable_nested_tensor=False
        )  # nested tensors are for inference
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``[batch, length]`` to logits ``[batch, classes]``."""
        positions: Tensor = self.encoder(self.embedding(tokens) + self.positional_encoding)
        logits: Tensor = self.head(positions.mean(dim=1))
        return logits
