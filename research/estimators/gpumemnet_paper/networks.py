"""GPUMemNet's two networks (arXiv 2602.17817, section 5): an ensemble of tiny MLPs, and one
preceded by two tiny encoders.

Two defects of the original are corrected.  The logits enter the cross-entropy without a softmax.
Attention runs over a job's layers with masked padding, not over the jobs of a batch.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor, nn

from gpumemnet.job.layers import GROUP_NAMES

# Shapes: B jobs, F features, L layers, D inputs, E ensemble members, H hidden width, C classes, W
# width of an encoder.

MEMBERS: Final = 13
HIDDEN_WIDTHS: Final = (8, 4)
ENCODER_WIDTHS: Final = (4, 6)
ENCODER_LAYERS: Final = 2
FEED_FORWARD_WIDTH: Final = 64
"""Width of the feed-forward network, not given in the paper.

With it the network for MLPs has 6,600 parameters; the paper's networks have 7,600 to 13,600.
"""


class Standardise(nn.Module):
    """Standardises columns with the mean and deviation of the training rows; constant columns
    become 0."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, training_NF: Tensor) -> None:
        super().__init__()
        deviation = training_NF.std(0)
        self.register_buffer("mean", training_NF.mean(0))
        self.register_buffer("deviation", torch.where(deviation > 1e-6, deviation, 1.0))

    def forward(self, values: Tensor) -> Tensor:
        """Return the standardised values, any shape ``[..., F]``."""
        return (values - self.mean) / self.deviation


class TinyMLPs(nn.Module):
    """All members of the ensemble, with a leading member axis in each weight; returns the mean of
    their logits."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        widths = (inputs, *HIDDEN_WIDTHS, classes)
        pairs = list(pairwise(widths))
        # The initialisation of nn.Linear, applied to each member's slice of the weight.
        self.weights = nn.ParameterList(_uniform((MEMBERS, ins, outs), ins) for ins, outs in pairs)
        self.biases = nn.ParameterList(_uniform((MEMBERS, outs), ins) for ins, outs in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm1d(MEMBERS * width) for width in HIDDEN_WIDTHS)

    def forward(self, inputs_BD: Tensor) -> Tensor:
        """Logits, shape ``[B, C]``."""
        values_BED = inputs_BD[:, None].expand(-1, MEMBERS, -1)
        for weight, bias, norm in zip(self.weights, self.biases, self.norms, strict=False):
            values_BEH = torch.einsum("bed,edh->beh", values_BED, weight) + bias
            values_BED = norm(values_BEH.flatten(1)).relu().unflatten(1, (MEMBERS, -1))
        logits_BEC = torch.einsum("bed,edc->bec", values_BED, self.weights[-1]) + self.biases[-1]
        logits_BC: Tensor = logits_BEC.mean(1)
        return logits_BC


def _uniform(shape: tuple[int, ...], inputs: int) -> nn.Parameter:
    return nn.Parameter(
        torch.empty(shape).uniform_(-1.0 / math.sqrt(inputs), 1.0 / math.sqrt(inputs))
    )


class PaperMLP(nn.Module):
    """The MLP-based estimator: standardised features, then the ensemble."""

    def __init__(self, features_NF: Tensor, classes: int) -> None:
        """Create the network for ``classes`` classes; ``features_NF`` are the training rows for
        standardisation."""
        super().__init__()
        self.standardise = Standardise(features_NF)
        self.members = TinyMLPs(features_NF.shape[1], classes)

    def forward(self, features_BF: Tensor) -> Tensor:
        """Logits, shape ``[B, C]``."""
        logits: Tensor = self.members(self.standardise(features_BF))
        return logits


class PaperTransformer(nn.Module):
    """The transformer-based estimator: the ensemble over the features and two mean-pooled encoders
    of the layers.

    There is no positional encoding, so the encoders treat the sequence as a set.
    """

    def __init__(
        self, features_NF: Tensor, sequences_NL3: Tensor, mask_NL: Tensor, classes: int
    ) -> None:
        """Create the network for ``classes`` classes; the first three arguments are the training
        rows for standardisation."""
        super().__init__()
        self.standardise = Standardise(features_NF)
        self.standardise_layers = Standardise(sequences_NL3[mask_NL][:, 1:])
        self.projections = nn.ModuleList(
            nn.Linear(len(GROUP_NAMES) + 2, width) for width in ENCODER_WIDTHS
        )
        self.encoders = nn.ModuleList(_encoder(width) for width in ENCODER_WIDTHS)
        self.members = TinyMLPs(features_NF.shape[1] + sum(ENCODER_WIDTHS), classes)

    def forward(self, features_BF: Tensor, sequences_BL3: Tensor, mask_BL: Tensor) -> Tensor:
        """Return the logits, shape ``[B, C]``; ``mask_BL`` is true for real layers, of which every
        job has at least one."""
        groups_BLG = nn.functional.one_hot(sequences_BL3[..., 0].long(), len(GROUP_NAMES)).to(
            sequences_BL3
        )
        layers_BLD = torch.cat(
            (groups_BLG, self.standardise_layers(sequences_BL3[..., 1:])), dim=-1
        )
        pooled = []
        for projection, encoder in zip(self.projections, self.encoders, strict=True):
            encoded_BLW = encoder(projection(layers_BLD), src_key_padding_mask=~mask_BL)
            encoded_BLW = encoded_BLW.masked_fill(~mask_BL[..., None], 0.0)
            pooled.append(encoded_BLW.sum(1) / mask_BL.sum(1, keepdim=True))
        logits: Tensor = self.members(torch.cat((self.standardise(features_BF), *pooled), dim=1))
        return logits


def _encoder(width: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        width, nhead=1, dim_feedforward=FEED_FORWARD_WIDTH, dropout=0.0, batch_first=True
    )
    return nn.TransformerEncoder(layer, ENCODER_LAYERS, enable_nested_tensor=False)
