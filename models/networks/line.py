"""The line over the closed form, inside every network: terms, groups of jobs, and their fit.

A closed form needs no training, so the line is fitted first, by median regression over all label
sources, and fixed.  It adds what a layer list does not say.  Libraries compute the loss of a
language model in fp32 and hold its logits meanwhile, and attention in single steps keeps copies of
its matrices.  Each group of jobs has a shift and bounds of its own, so that a rare cause of large
errors does not widen every bound.  This is Mondrian conformal prediction (Vovk et al., Algorithmic
Learning in a Random World, section 4.5).

The line grows with the batch, because its terms do and no slope is below zero but that of the norms
(below).  No job changes its group with the batch: groups are read from the features at the
reference batch size (:func:`gpumemnet.predict.features.model_features`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from scipy.optimize import lsq_linear
from torch import Tensor, nn
from torch.nn import Buffer

from gpumemnet.job.job_table import Array
from gpumemnet.predict.features import FEATURE_NAMES

# Shapes: B jobs, F feature columns, T terms, G groups.


TERMS: Final = (
    ("has_layers", "has_layers"),
    ("segment_bytes", "has_layers"),
    ("unfragmented_bytes", "has_layers"),
    ("segment_bytes", "is_checkpointed"),
    ("unfragmented_bytes", "is_checkpointed"),
    ("logits_bytes", "has_layers"),
    ("logits_bytes", "is_autocast"),
    ("logits_bytes", "is_half"),
    ("attention_matrix_bytes", "has_layers"),
    ("kept_by_norm_bytes", "is_cnn"),
)
"""Terms of a job with layers, each the product of two features; ``has_layers`` is 1.

In order: 1; the closed form with and without fragmentation, the same for jobs that recompute blocks
(the two terms before are zero for these); the logits, once more under autocast, and once more for
weights in half precision; attention matrices; and what the norms of CNNs keep unless it is
recomputed.  Recomputing frees tensors of all sizes again and again, and the closed form, which adds
the peaks of the size classes, counts more than is reserved.

The last has a slope below zero.  Where norms keep much, little of the peak is workspaces and
temporary tensors of convolutions, of which the closed form knows least.  It is at most what the
peak exceeds the optimizer's step by, so that it grows only where the closed form does.
"""
TOTALS_TERMS: Final = (
    (),
    ("weight_bytes", "gradient_bytes", "optimizer_state_bytes", "optimizer_temporary_bytes"),
    ("activation_bytes",),
    ("input_bytes",),
)
"""Terms of a job with totals only: 1, and sums of features."""
GROUPS: Final = (
    "checkpointed",
    "partly_trained",
    "normalised_cnn",
    "cnn",
    "half_language_model",
    "language_model",
    "transformer",
    "embedding",
    "mlp",
)
"""The first that fits is a job's group.

* ``checkpointed``: blocks are recomputed; a layer list does not say how much of them at a time.
* ``partly_trained``: frozen parameters, or Adafactor, which holds a convolution's update in several
  forms.
* ``normalised_cnn``: norms keep at least :data:`NORMS_SHARE` of all outputs, so that workspaces of
  convolutions, which no layer list shows, are a small part of the peak.
* ``half_language_model``: a language model with weights in half precision; only some convert their
  logits to fp32.
* ``language_model``: embeddings, and logits of at least :data:`LOGITS_SHARE` of all outputs, in no
  CNN.
* ``embedding``: recommenders and recurrent networks, whose errors are ten times those of MLPs.
"""
VARIANTS: Final = ("layers", "layers, cudnn_benchmark", "totals", "totals, cudnn_benchmark")
"""Each group once for each of these: searches of cuDNN leave free segments behind."""
GROUP_NAMES: Final = tuple(f"{group}, {variant}" for variant in VARIANTS for group in GROUPS)
LOGITS_SHARE: Final = 0.02
NORMS_SHARE: Final = 0.04
ALL_TRAINED: Final = 0.99
_CONDITIONS: Final[tuple[Mapping[str, float], ...]] = (
    {"is_checkpointed": 1.0, "": -0.5},
    {"trainable_share": -1.0, "": ALL_TRAINED},
    {"is_factored": 1.0, "": -0.5},
    {"kept_by_conv_bytes": 1.0, "": -0.5},
    {"is_cnn": 1.0, "": -0.5},
    {"kept_by_norm_bytes": 1.0, "activation_bytes": -NORMS_SHARE},
    {"logits_bytes": 1.0, "activation_bytes": -LOGITS_SHARE},
    {"is_half": 1.0, "": -0.5},
    {"is_transformer": 1.0, "": -0.5},
    {"embedding_count": 1.0, "recurrent_count": 1.0, "sequence_length": 1.0, "": -0.5},
    {"has_layers": -1.0, "": 0.5},
    {"is_cudnn_benchmark": 1.0, "": -0.5},
)
"""Weighted sums of features that are above zero where a property holds; the key ``""`` is a
constant."""


def affine(amounts: tuple[Mapping[str, float], ...]) -> nn.Linear:
    """Return what maps features to the amounts, ``[B, F]`` to ``[B, len(amounts)]``; it does not
    train."""
    found = nn.Linear(len(FEATURE_NAMES), len(amounts)).requires_grad_(False)
    for parameter in found.parameters():
        parameter.zero_()
    for row, amount in enumerate(amounts):
        for name, factor in amount.items():
            if name:
                found.weight[row, FEATURE_NAMES.index(name)] = factor
            else:
                found.bias[row] = factor
    return found


class Line(nn.Module):
    """The line in bytes, and each job's group, from both halves of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            affine(tuple({pair[side]: 1.0} for pair in TERMS)) for side in (0, 1)
        )
        self.beyond_step = affine(({"unfragmented_bytes": 1.0, "step_bytes": -1.0},))
        self.totals_terms = affine(
            tuple(dict.fromkeys(names or ("",), 1.0) for names in TOTALS_TERMS)
        )
        self.conditions = affine(_CONDITIONS)
        self.earlier = Buffer(torch.ones(len(GROUPS), len(GROUPS)).triu(1))
        self.slopes = Buffer(torch.zeros(len(TERMS), 1))
        self.totals_slopes = Buffer(torch.zeros(len(TOTALS_TERMS), 1))

    def forward(self, own_BF: Tensor, reference_BF: Tensor) -> tuple[Tensor, Tensor]:
        """Return the line ``[B, 1]``, which is never below zero, and one of :data:`GROUP_NAMES` as
        1 among zeros, ``[B, 4 G]``."""
        flags_BC = (self.conditions(reference_BF) > 0).to(own_BF.dtype)
        flags = torch.split(flags_BC, 1, dim=1)
        checkpointed, frozen, factored, convolves, cnn, norms, logits, half, attends, embeds = (
            flags[:10]
        )
        totals_B1, benchmark_B1 = flags[10:]
        chosen = (
            *(checkpointed, torch.maximum(frozen, factored * convolves), cnn * norms, cnn),
            *(logits * embeds * half, logits * embeds, attends, embeds, torch.ones_like(cnn)),
        )
        fitting_BG = torch.cat(chosen, dim=1)
        groups_BG = fitting_BG * (fitting_BG @ self.earlier < 0.5).to(own_BF.dtype)
        layers_B1, plain_B1 = 1.0 - totals_B1, 1.0 - benchmark_B1
        groups_BG = torch.cat(
            [
                groups_BG * (mode * searched)
                for mode in (layers_B1, totals_B1)
                for searched in (plain_B1, benchmark_B1)
            ],
            dim=1,
        )
        of_layers_B1 = self.terms(own_BF, checkpointed) @ self.slopes
        of_totals_B1 = self.totals_terms(own_BF) @ self.totals_slopes
        return torch.relu(of_layers_B1 * layers_B1 + of_totals_B1 * totals_B1), groups_BG

    def terms(self, own_BF: Tensor, checkpointed_B1: Tensor) -> Tensor:
        """Return :data:`TERMS`, ``[B, T]``; ``checkpointed_B1`` is 1 where blocks are recomputed."""
        products = self.left(own_BF) * self.right(own_BF)
        one, segments, unfragmented, *others, norms_B1 = torch.split(products, 1, dim=1)
        kept_B1 = 1.0 - checkpointed_B1
        beyond_B1 = self.beyond_step(own_BF) * kept_B1
        plain = (one, segments * kept_B1, unfragmented * kept_B1)
        return torch.cat((*plain, *others, torch.minimum(norms_B1, beyond_B1)), dim=1)


_ANY: Final = (-math.inf, math.inf)
SLOPE_BOUNDS: Final[Mapping[int, tuple[float, float]]] = {0: _ANY, len(TERMS) - 1: (-1.0, 0.0)}
"""Position of a term with layers → its least and largest slope, where these are not
:data:`USUAL_SLOPES`."""
TOTALS_SLOPE_BOUNDS: Final[Mapping[int, tuple[float, float]]] = {0: _ANY}
USUAL_SLOPES: Final = (0.0, 8.0)
"""Least and largest slope of all other terms.

At least 0, so that the line grows with the batch as its terms do.  At most 8, as no tensor has more
copies at one time: with a larger slope the few bytes of a classifier's output would stand in for
the batch size.
"""
ITERATIONS: Final = 60
LEAST_ERROR: Final = 1e-4
"""Relative errors below this weigh no more."""


def fit_slopes(
    terms: Array,
    amounts: Array,
    scales: Array,
    weights: Array,
    bounds: Mapping[int, tuple[float, float]],
) -> Array:
    """Return the slopes within ``bounds`` that give the least sum of weighted relative errors,
    shape ``[T]``.

    Median regression by least squares that are weighted anew by the errors (Schlossmacher, JASA 68,
    1973).

    Args:
        terms: shape ``[B, T]``.
        amounts: what the line should give, shape ``[B]``.
        scales: what errors are relative to, shape ``[B]``.
        weights: of the rows, shape ``[B]``.
        bounds: as :data:`SLOPE_BOUNDS`.
    """
    limits = np.array([bounds.get(term, USUAL_SLOPES) for term in range(terms.shape[1])])
    largest = np.abs(terms).max(axis=0)
    units = np.where(largest > 0, largest, 1.0)
    inputs, target = terms / (units * scales[:, None]), amounts / scales
    factors = np.sqrt(weights)
    for _ in range(ITERATIONS):
        found = lsq_linear(
            inputs * factors[:, None], target * factors, (limits * units[:, None]).T, method="bvls"
        ).x
        errors = np.abs(inputs @ found - target)
        factors = np.sqrt(weights / np.maximum(errors, LEAST_ERROR))
    return found / units
