"""The transformer-based classifier: attention over a job's layers together with its feature vector.

The encoder is GPUMemNet's (arXiv 2602.17817, section 5.2: tiny transformer encoders over (type,
activations, parameters) of each layer, pooled, with the job features).  Attention runs over the
layers, padding is masked, and any length is supported.  The head is that of the MLP-based
classifier.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gpumemnet.predict.features import SEQUENCE_COLUMNS

from .mlp import FeatureTransform, MemberMLPs, Mixture

# Shapes: B jobs, L layers, F feature columns, D inputs of the head, W width of the encoder.


class LayerAttention(nn.Module):
    """One encoder layer: attention over the layers of a job, then a feed-forward network, each
    preceded by a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.projections = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.before_feed_forward = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, tokens_BLW: Tensor, bias_B11L: Tensor) -> Tensor:
        """Return the transformed tokens, shape ``[B, L, W]``; the attention bias is 0, or very
        negative for padding."""
        batch, length, width = tokens_BLW.shape
        split = self.projections(self.before_attention(tokens_BLW)).reshape(
            batch, length, 3, self.heads, width // self.heads
        )
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        scores = query @ key.transpose(-1, -2) * (width // self.heads) ** -0.5 + bias_B11L
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, length, width)
        tokens_BLW = tokens_BLW + self.output(mixed)
        hidden = nn.functional.silu(self.widen(self.before_feed_forward(tokens_BLW)))
        summed: Tensor = tokens_BLW + self.narrow(hidden)
        return summed


class LayerEncoder(nn.Module):
    """Encodes a layer sequence as one vector: embedding, attention, then mean and maximum over the
    layers."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Linear(len(SEQUENCE_COLUMNS) + 1, width)
        self.attention = nn.ModuleList(LayerAttention(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, sequences_BLF: Tensor, mask_BL: Tensor, reference_B1: Tensor) -> Tensor:
        """Return the vectors, shape ``[B, 2 · W]``.

        Args:
            sequences_BLF: the columns :data:`gpumemnet.predict.features.SEQUENCE_COLUMNS`.
            mask_BL: 1 for a layer, 0 for padding.
            reference_B1: the closed form in log-bytes; amounts are relative to it.
        """
        kinds, amounts = sequences_BLF[:, :, :-2], sequences_BLF[:, :, -2:]
        mask_BL1 = mask_BL.unsqueeze(-1)
        place_BL1 = mask_BL1.cumsum(1) / mask_BL1.sum(1, keepdim=True)
        relative = (amounts - reference_B1.unsqueeze(-1)).clamp_min(-20.0) * 0.2
        tokens_BLW = self.embedding(torch.cat((kinds, relative, place_BL1), dim=-1))
        bias_B11L = ((1.0 - mask_BL) * -1e4)[:, None, None, :]
        for layer in self.attention:
            tokens_BLW = layer(tokens_BLW, bias_B11L)
        tokens_BLW = self.norm(tokens_BLW)
        mean = (tokens_BLW * mask_BL1).sum(1) / mask_BL1.sum(1)
        most = (tokens_BLW - (1.0 - mask_BL1) * 1e4).amax(1)
        return torch.cat((mean, most), dim=1)


class SequenceInputs(nn.Module):
    """Transform and encoder, which compute the inputs of the head."""

    def __init__(self, transform: FeatureTransform, encoder: LayerEncoder) -> None:
        super().__init__()
        self.transform = transform
        self.encoder = encoder

    def forward(
        self, features_BF: Tensor, sequences_BLF: Tensor, mask_BL: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the head's inputs ``[B, D]``, and the transform's reference and unit ``[B, 1]``
        and groups ``[B, 4]``."""
        inputs_BD, reference_B1, units_B1, groups_B4 = self.transform(features_BF)
        pooled = self.encoder(sequences_BLF, mask_BL, reference_B1)
        return torch.cat((inputs_BD, pooled), dim=1), reference_B1, units_B1, groups_B4


class SequenceNetwork(nn.Module):
    """Encoder and members in training."""

    def __init__(self, encoder: LayerEncoder, members: MemberMLPs) -> None:
        super().__init__()
        self.encoder = encoder
        self.members = members

    def forward(
        self,
        inputs_BD: Tensor,
        reference_B1: Tensor,
        flags_BS: Tensor,
        sequences_BLF: Tensor,
        mask_BL: Tensor,
    ) -> Mixture:
        """Return the members' mixtures, ``[B, E, K]`` each.

        Args:
            inputs_BD, reference_B1: the transform's inputs and reference.
            flags_BS: inputs that tell the label sources apart.
            sequences_BLF, mask_BL: as for :class:`LayerEncoder`.
        """
        pooled = self.encoder(sequences_BLF, mask_BL, reference_B1)
        mixture: Mixture = self.members(
            torch.cat((inputs_BD, pooled, flags_BS), dim=1).unsqueeze(0)
        )
        return mixture


def encoder_width(width: int) -> int:
    """Return the number of inputs that the encoder adds to the head."""
    return 2 * width


def initialised(width: int, depth: int, heads: int, seed: int) -> LayerEncoder:
    """Return an encoder whose random weights depend on ``seed`` alone, not on earlier random
    numbers."""
    generator = torch.Generator().manual_seed(seed)
    encoder = LayerEncoder(width, depth, heads)
    with torch.no_grad():
        for module in encoder.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(
                    torch.randn(module.weight.shape, generator=generator)
                    / math.sqrt(module.in_features)
                )
                module.bias.zero_()
    return encoder
