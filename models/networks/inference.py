"""The classifiers in inference: the trained networks, rearranged into a few large operations.

Each node of a graph costs a third of a microsecond.  onnxruntime packs the weights of
two-dimensional products once, when it loads the graph, but those of other products at every call.
Two-dimensional products also give each row the same result alone and in a batch.  So the members'
weights are concatenated, and sums are products with ones.  Every constant is a buffer in the form
that the operations need.  So classifiers of one architecture differ in their state only
(:mod:`models.training.card`).
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import Buffer

from gpumemnet.predict.features import SEQUENCE_COLUMNS
from gpumemnet.predict.predictor import SLACK_BYTES
from gpumemnet.units import MIB

from .mlp import (
    BACKGROUND_SCALE,
    BACKGROUND_WEIGHT,
    LANES,
    MEAN_DEVIATION,
    MOST_SPREAD,
    SMALLEST_SCALE,
    Inputs,
    MemberMLPs,
)

# Shapes: B jobs, L layers, F feature columns, D inputs, E ensemble members, H hidden width, K
# mixture components, G groups of
# jobs, C coverages.

MAX_LOGIT: Final = 40.0
"""Limit of logits and log-scales, far above trained values, which keeps their exponentials
finite."""
LEAST_BYTES: Final = float(MIB)
"""No answer is below this, above the CUDA context."""


class SideBySide(nn.Module):
    """All trained members and the background component, computed with two-dimensional products."""

    def __init__(self, members: MemberMLPs) -> None:
        super().__init__()
        first, second, last = (weight.detach() for weight in members.weights)
        first_bias, second_bias, last_bias = (bias.detach() for bias in members.biases)
        count, self.hidden, _ = last.shape
        components = members.components
        self.first = Buffer(first.transpose(0, 1).flatten(1))
        self.first_bias = Buffer(first_bias.flatten())
        self.second = nn.ParameterList(
            nn.Parameter(member.clone(), requires_grad=False) for member in second
        )
        self.second_biases = nn.ParameterList(
            nn.Parameter(member.clone(), requires_grad=False) for member in second_bias
        )

        order = torch.tensor([0, 2, 1])
        apart = torch.eye(count)[:, None, None, :, None]
        weights = last.reshape(count, self.hidden, 3, 1, components) * apart
        weights = weights.reshape(count * self.hidden, 3, count * components)
        self.last = Buffer(nn.functional.pad(weights, (0, 1))[:, order].flatten(1))
        biases = (
            last_bias.reshape(count, 3, components).transpose(0, 1).reshape(3, count * components)
        )
        background = torch.tensor([[0.0], [0.0], [math.log(BACKGROUND_SCALE - SMALLEST_SCALE)]])
        self.last_bias = Buffer(torch.cat((biases, background), dim=1)[order].flatten())

    def forward(self, inputs_BD: Tensor) -> Tensor:
        """Return logits, logarithms of the scales minus their floor, and locations, shape ``[B, 3
        (E·K + 1)]``."""
        hidden_BH = nn.functional.silu(torch.addmm(self.first_bias, inputs_BD, self.first))
        members_in_turn = zip(
            self.second_biases, torch.split(hidden_BH, self.hidden, dim=1), self.second, strict=True
        )
        hidden_BH = nn.functional.silu(
            torch.cat(
                [torch.addmm(bias, member, weight) for bias, member, weight in members_in_turn],
                dim=1,
            )
        )
        return torch.addmm(self.last_bias, hidden_BH, self.last)


class MixtureHead(nn.Module):
    """Computes the graph's outputs (:mod:`gpumemnet.predict.bundle`): members, mixture and
    calibrated bounds.

    It combines the members' forward pass and :func:`models.networks.mlp.centre_and_spread`.
    """

    def __init__(
        self, members: MemberMLPs, inputs: Inputs, multiples: Tensor, added_spread: float
    ) -> None:
        """Create the head from trained members.

        Args:
            members: the trained members.
            inputs: the fitted inputs.
            multiples: of the spread with the constant added, for each of
                :data:`models.networks.line.GROUP_NAMES` and each calibrated coverage, ``[G, C]``.
            added_spread: constant added to every spread, in units of the line's error.
        """
        super().__init__()
        count, components = len(members.weights[0]), members.components
        self.width = count * components + 1
        share = (1.0 - BACKGROUND_WEIGHT) / count
        all_but_background = torch.tensor([[1.0]] * (self.width - 1) + [[0.0]])
        # A component's weight is its odds, divided by the sum of its member's odds, times the
        # member's share of the weight.
        of_member = torch.kron(torch.eye(count), torch.full((components, components), 1.0 / share))
        of_member = (
            nn.functional.pad(of_member, (0, 1, 0, 1))
            + torch.diag(1.0 - all_but_background[:, 0]) / BACKGROUND_WEIGHT
        )
        self.members = SideBySide(members)
        self.all_but_background = Buffer(all_but_background)
        self.of_member = Buffer(of_member)
        self.multiples = Buffer(multiples * inputs.units / (1.0 - BACKGROUND_WEIGHT))
        padding = -(2 + multiples.shape[1] + self.width) % LANES
        self.amounts = [2 + multiples.shape[1], self.width, padding]
        self.padding = Buffer(torch.zeros(1, padding))
        self.floor = Buffer(torch.tensor([[added_spread * (1.0 - BACKGROUND_WEIGHT)]]))

    def forward(
        self, inputs_BD: Tensor, line_B1: Tensor, units_B1: Tensor, groups_BG: Tensor
    ) -> tuple[Tensor, ...]:
        """Return weights, locations, scales ``[B, E·K + 1]``; the line, the expectation and bounds
        ``[B, 2 + C]``, all in log-bytes above the CUDA context."""
        positive, locations_BK = torch.split(
            self.members(inputs_BD), [2 * self.width, self.width], dim=1
        )
        odds_BK, scales_BK = torch.split(
            positive.clamp(-MAX_LOGIT, MAX_LOGIT).exp(), self.width, dim=1
        )
        weights_BK = odds_BK / (odds_BK @ self.of_member)
        scales_BK = scales_BK + SMALLEST_SCALE
        heights_BK = weights_BK / scales_BK
        centre_B1 = (
            (heights_BK * locations_BK)
            @ self.all_but_background
            / (heights_BK @ self.all_but_background)
        )
        distances_BK = (locations_BK - centre_B1).abs() + MEAN_DEVIATION * scales_BK
        spread_B1 = (
            weights_BK * distances_BK
        ) @ self.all_but_background  # mean of the members, without the background
        spread_B1 = spread_B1.clamp_max(MOST_SPREAD * (1.0 - BACKGROUND_WEIGHT))
        expected_B1 = line_B1 + centre_B1 * units_B1
        bounds_BC = expected_B1 + (spread_B1 + self.floor) * (groups_BG @ self.multiples)
        locations_BK = line_B1 + locations_BK * units_B1
        with_slack = torch.cat(
            (line_B1, expected_B1, bounds_BC, locations_BK, line_B1 + self.padding), dim=1
        ).exp()
        above = (with_slack - SLACK_BYTES).clamp_min(LEAST_BYTES)
        amounts, locations, _ = torch.split(above.log(), self.amounts, dim=1)
        _, stretch_BK, _ = torch.split(with_slack / above, self.amounts, dim=1)
        return weights_BK, locations, scales_BK * units_B1 * stretch_BK, amounts


class Classifier(nn.Module):
    """Inputs and head: the graph of the MLP-based classifier; with an encoder, that of the
    transformer-based one."""

    def __init__(
        self, inputs: Inputs, head: MixtureHead, encoder: LayerEncoder | None = None
    ) -> None:
        super().__init__()
        self.inputs = inputs
        self.encoder = encoder
        self.head = head

    def forward(self, features_BF: Tensor, *sequences: Tensor) -> tuple[Tensor, ...]:
        """The outputs of :class:`MixtureHead`; an encoder is given the ``sequences`` and their
        mask."""
        inputs_BD, *reference = self.inputs(features_BF)
        if self.encoder:
            inputs_BD = torch.cat((inputs_BD, self.encoder(*sequences)), dim=1)
        return self.head(inputs_BD, *reference)


# Shapes: B jobs, L layers, F feature columns, D inputs of the head, W width of the encoder.


class LayerEncoder(nn.Module):
    """Encodes a layer sequence as one vector: embedding, attention, then mean and maximum over the
    layers."""

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Linear(len(SEQUENCE_COLUMNS) + 1, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, 0.0, nn.functional.silu, batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(width)
        self.attention = nn.TransformerEncoder(layer, depth, norm, enable_nested_tensor=False)

    def forward(self, sequences_BLF: Tensor, mask_BL: Tensor) -> Tensor:
        """Return the vectors, shape ``[B, 2 · W]``.

        Args:
            sequences_BLF: the columns :data:`gpumemnet.predict.features.SEQUENCE_COLUMNS`.
            mask_BL: 1 for a layer, 0 for padding.
        """
        kinds, amounts = sequences_BLF[:, :, :-2], sequences_BLF[:, :, -2:]
        mask_BL1 = mask_BL.unsqueeze(-1)
        place_BL1 = mask_BL1.cumsum(1) / mask_BL1.sum(1, keepdim=True)
        # amounts are relative to the largest of the job
        relative = (amounts - amounts.amax(1, keepdim=True)).clamp_min(-20.0) * 0.2
        tokens_BLW = self.embedding(torch.cat((kinds, relative, place_BL1), dim=-1))
        tokens_BLW = self.attention(tokens_BLW, src_key_padding_mask=(1.0 - mask_BL) * -1e4)
        mean = (tokens_BLW * mask_BL1).sum(1) / mask_BL1.sum(1)
        most = (tokens_BLW - (1.0 - mask_BL1) * 1e4).amax(1)
        return torch.cat((mean, most), dim=1)


def initialised(width: int, depth: int, heads: int, seed: int) -> LayerEncoder:
    """Return an encoder whose random weights depend on ``seed`` alone, not on earlier random
    numbers."""
    generator = torch.Generator().manual_seed(seed)
    encoder = LayerEncoder(width, depth, heads)
    with torch.no_grad():
        for name, weights in encoder.named_parameters():
            if weights.ndim == 2:
                drawn = torch.randn(weights.shape, generator=generator)
                weights.copy_(drawn / math.sqrt(weights.shape[1]))
            elif name.endswith("bias"):
                weights.zero_()
    return encoder
