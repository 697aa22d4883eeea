"""What both encoders have in common in training: the inputs, and an ensemble of small MLPs that
correct the line.

The head is a mixture of logistics over the logarithm of memory above the CUDA context, relative to
the line (:mod:`models.networks.line`).  So it supports bins of any width and respects their order.
The correction reads nothing that changes with the batch size: shares, ratios, and amounts for each
sample, from the features at the reference batch size.  So request and limit grow with the line, and
the line grows with the batch.  Its last layer starts at zero, and training pulls it there.  The
modules take raw feature columns, so the exported graph includes every transform
(:mod:`models.networks.inference`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import Buffer

from gpumemnet.job.layers import GROUP_NAMES as LAYER_GROUPS
from gpumemnet.physics.step_memory import SIZE_CLASSES
from gpumemnet.predict.features import FEATURE_NAMES
from gpumemnet.predict.predictor import SLACK_BYTES
from gpumemnet.units import MIB

from .line import GROUP_NAMES, Line, affine

# Shapes: B jobs, F feature columns, D inputs, E ensemble members, H hidden width, K mixture
# components, G groups of jobs.

SMALLEST_SCALE: Final = 0.03
"""Floor of a component's scale, in units of the line's typical error in the job's group."""
MOST_SPREAD: Final = 4.0
"""Bounds are no wider than those of this spread, in the same units."""
BACKGROUND_WEIGHT: Final = 0.005
BACKGROUND_SCALE: Final = 8.0
"""Scale of a wide component with small weight that absorbs faulty labels, in the same units."""
MEAN_DEVIATION: Final = 2.0 * math.log(2.0)
"""Mean absolute deviation of a logistic of scale 1."""
LANES: Final = 16
"""Rows of logarithms are padded to a multiple of this, so that vector code computes all of them:
onnxruntime computes the remaining numbers one by one, and these differ in the last bits."""
CONSTANT: Final = 1e-5
"""The transform drops inputs that vary less than this over the training jobs."""

Amount = Mapping[str, float]
"""A weighted sum of feature columns; the key ``""`` is a constant."""

_ONE: Final[Amount] = {"": 1.0}
_ACTIVATIONS: Final[Amount] = {"activation_bytes": 1.0, "": 1.0}
_WEIGHTS: Final[Amount] = {"weight_bytes": 1.0, "": 1.0 * MIB}
_PEAK: Final[Amount] = {"unfragmented_bytes": 1.0, "": 1.0 * MIB}
_LEAST_SHARE: Final = 1e-3
"""Smaller shares are told apart no more, so that their logarithms stay small."""


def _share(name: str, whole: Amount) -> tuple[Amount, Amount]:
    least = {column: _LEAST_SHARE * factor for column, factor in whole.items()}
    return {**least, name: 1.0 + least.get(name, 0.0)}, whole


TOTAL_RATIOS: Final[tuple[tuple[Amount, Amount], ...]] = (
    ({"activation_bytes": 1.0, "": 1e4}, _ONE),
    (_WEIGHTS, _ONE),
    (_ACTIVATIONS, _WEIGHTS),
    _share("input_bytes", _ACTIVATIONS),
    _share("gradient_bytes", _WEIGHTS),
    _share("optimizer_state_bytes", _WEIGHTS),
    _share("optimizer_temporary_bytes", _WEIGHTS),
    ({"total_activations": 1.0, "": 1.0}, {"input_elements": 1.0, "": 1.0}),
    ({"sequence_length": 1.0, "": 1.0}, _ONE),
    ({"gradient_accumulation": 1.0}, _ONE),
)
"""Pairs of amounts that totals determine; the inputs are the logarithms of their ratios."""
LAYER_RATIOS: Final[tuple[tuple[Amount, Amount], ...]] = (
    *(_share(f"kept_by_{group}_bytes", _ACTIVATIONS) for group in LAYER_GROUPS),
    *(_share(f"kept_{size}_bytes", _ACTIVATIONS) for size in SIZE_CLASSES),
    *(_share(f"peak_{size}_bytes", _PEAK) for size in SIZE_CLASSES),
    *(_share(f"weights_{size}_bytes", _WEIGHTS) for size in SIZE_CLASSES),
    *(
        _share(name, _ACTIVATIONS)
        for name in (
            *("largest_convolution_bytes", "largest_activation_bytes"),
            *("logits_bytes", "attention_matrix_bytes"),
        )
    ),
    _share("largest_weight_bytes", _WEIGHTS),
    *(
        _share(name, _PEAK)
        for name in (
            "segment_bytes",
            "resident_bytes",
            "loss_bytes",
            "backward_bytes",
            "step_bytes",
        )
    ),
    *(({f"{name}_count": 1.0, "": 1.0}, _ONE) for name in (*LAYER_GROUPS, "layer", "block")),
)
"""Pairs of amounts that need the layers."""
FLAGS: Final = (
    *(name for name in FEATURE_NAMES if name.startswith("is_")),
    "trainable_share",
    "has_layers",
)
"""Inputs as they are; the transform drops one that is equal for all training jobs."""


class Inputs(nn.Module):
    """Converts raw features to the network's inputs, and to the reference: the line and its group.

    Jobs with layers and jobs with totals only share the network.  The totals enter twice, once for
    each, so that both have separate weights; a mask sets the inputs of the other to zero.
    """

    def __init__(self) -> None:
        super().__init__()
        self.line = Line()
        pairs = (*LAYER_RATIOS, *TOTAL_RATIOS)
        padding = ((_ONE, _ONE),) * (-(len(pairs) + 1) % LANES)  # and the line
        above, below = zip(*(*pairs, *padding), strict=True)
        self.pairs = [len(LAYER_RATIOS), len(TOTAL_RATIOS), len(padding)]
        width = len(pairs) + len(FLAGS)
        self.width = width + len(TOTAL_RATIOS) + len(FLAGS)
        self.numerators, self.denominators = affine(above), affine(below)
        self.flags = affine(tuple({name: 1.0} for name in FLAGS))
        self.lowest = Buffer(torch.full((width,), -torch.inf))
        self.highest = Buffer(torch.full((width,), torch.inf))
        self.mean = Buffer(torch.zeros(width))
        self.deviation = Buffer(torch.ones(width))
        self.shifts = Buffer(torch.zeros(len(GROUP_NAMES), 1))
        self.units = Buffer(torch.ones(len(GROUP_NAMES), 1))

    def raw(self, reference_BF: Tensor, line_B1: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs before they are standardised, those that need layers first; and the
        logarithm of the line with :data:`SLACK_BYTES`."""
        above, below = self.numerators(reference_BF), self.denominators(reference_BF)
        slack_B1 = line_B1 + SLACK_BYTES
        above = torch.cat((above, slack_B1), dim=1).log()
        ratios, line_B1 = torch.split(above, [sum(self.pairs), 1], dim=1)
        below = torch.cat((below, slack_B1), dim=1).log()[:, :-1]
        layers, totals, _ = torch.split(ratios - below, self.pairs, dim=1)
        return torch.cat((layers, totals, self.flags(reference_BF)), dim=1), line_B1

    def fit(self, raw_BD: Tensor) -> None:
        """Set range, mean and deviation from :meth:`raw` of training jobs with layers."""
        self.lowest.copy_(raw_BD.amin(0))
        self.highest.copy_(raw_BD.amax(0))
        self.mean.copy_(raw_BD.mean(0))
        deviation = raw_BD.std(0)
        self.deviation.copy_(torch.where(deviation > CONSTANT, deviation, torch.inf))
        self.lowest[-1], self.mean[-1], self.deviation[-1] = 0.0, 0.0, 1.0  # totals have no layers

    def forward(self, features_BF: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return inputs ``[B, D]``; the line's centre and the unit of the output, both in
        logarithms of bytes plus :data:`SLACK_BYTES`, ``[B, 1]``; groups ``[B, G]``.

        Args:
            features_BF: :func:`gpumemnet.predict.features.model_features`.
        """
        own_BF, reference_BF = torch.split(features_BF, len(FEATURE_NAMES), dim=1)
        line_B1, groups_BG = self.line(own_BF, reference_BF)
        raw_BD, line_B1 = self.raw(reference_BF, line_B1)
        clipped_BD = torch.minimum(torch.maximum(raw_BD, self.lowest), self.highest)
        inputs_BD = (clipped_BD - self.mean) / self.deviation
        layers, totals = torch.split(
            inputs_BD, [self.pairs[0], inputs_BD.shape[1] - self.pairs[0]], dim=1
        )
        has_layers_B1 = self.flags(reference_BF)[:, -1:]
        inputs_BD = torch.cat(
            (layers * has_layers_B1, totals * has_layers_B1, totals * (1.0 - has_layers_B1)), dim=1
        )
        centre_B1 = line_B1 + groups_BG @ self.shifts
        return inputs_BD, centre_B1, groups_BG @ self.units, groups_BG


Mixture = tuple[Tensor, Tensor, Tensor]
"""Weights, locations and scales of each member's components, ``[B, E, K]`` each, in units of the
line's typical error, around the line's centre."""


class MemberMLPs(nn.Module):
    """``E`` MLPs with two hidden layers each, computed as batched matrix products.

    The last layer starts at zero: at first every member is the line.
    """

    def __init__(self, inputs: int, members: int, hidden: int, components: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.components = components
        widths = (inputs, hidden, hidden, 3 * components)
        gains = (1.4, 1.4, 0.0)
        self.weights = nn.ParameterList(
            torch.randn(members, rows, columns, generator=generator) * (gain / math.sqrt(rows))
            for rows, columns, gain in zip(widths, widths[1:], gains, strict=False)
        )
        self.biases = nn.ParameterList(torch.zeros(members, 1, columns) for columns in widths[1:])
        with torch.no_grad():
            self.biases[2][:, :, components : 2 * components] = torch.linspace(
                -0.8, 0.8, components
            )
            self.biases[2][:, :, 2 * components :] = -0.7

    def forward(self, inputs_EBD: Tensor) -> Mixture:
        """Return each member's mixture."""
        hidden_EBH = nn.functional.silu(inputs_EBD @ self.weights[0] + self.biases[0])
        hidden_EBH = nn.functional.silu(hidden_EBH @ self.weights[1] + self.biases[1])
        outputs_BEK = (hidden_EBH @ self.weights[2] + self.biases[2]).transpose(0, 1)
        logits_BEK, locations_BEK, scales_BEK = torch.split(outputs_BEK, self.components, dim=-1)
        return logits_BEK.softmax(-1), locations_BEK, scales_BEK.exp() + SMALLEST_SCALE


def centre_and_spread(weights: Tensor, locations: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mixture's centre and the mean distance of its mass from the centre; ``[..., K]`` to
    ``[..., 1]`` each.

    The centre is the mean of the locations, weighted by each component's height ``weight / scale``.
    It is close to the mode and needs no search.  The spread is proportional to the sum of the
    weights.
    """
    heights = weights / scales
    centre = (heights * locations).sum(-1, keepdim=True) / heights.sum(-1, keepdim=True)
    distances = (locations - centre).abs() + MEAN_DEVIATION * scales
    return centre, (weights * distances).sum(-1, keepdim=True)


def mixture_cdf(mixture: Mixture, positions: Tensor) -> Tensor:
    """Return the CDF of each member's mixture and background, at positions ``[B, E]`` in units of
    the line's error."""
    weights, locations, scales = mixture
    cumulative = (weights * torch.sigmoid((positions[..., None] - locations) / scales)).sum(-1)
    return (1.0 - BACKGROUND_WEIGHT) * cumulative + BACKGROUND_WEIGHT * torch.sigmoid(
        positions / BACKGROUND_SCALE
    )
