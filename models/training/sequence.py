"""Trains the transformer-based classifier and calibrates its safe bytes.

One fold of the training architectures is held out.  It chooses the epoch and gives the conformal
multiples (split conformal prediction, :mod:`models.training.bounds`).  The guarantee does not apply
exactly, because the same fold chooses the epoch and the added spread.  So every evaluation measures the
coverage on held-out folds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpumemnet.predict.features import layer_sequence

from ..networks.inference import (
    MixtureHead,
    SequenceClassifier,
    SequenceInputs,
    SequenceNetwork,
    encoder_width,
    initialised,
)
from ..networks.mlp import (
    FeatureTransform,
    MemberMLPs,
    Mixture,
    centre_and_spread,
    float_tensor,
    mixture_cdf,
)
from ..networks.physics_line import LAYER_TERMS
from .bounds import (
    Errors,
    added_spread,
    calibrated_coverages,
    conformal_scores,
    errors_of,
    multiples_by_family,
)
from .data import LabelledJobs, fold_numbers
from .mlp import (
    Optimization,
    TrainedClassifier,
    extrapolation_scale,
    fitted_transform,
    label_interval,
)

HELD_OUT: Final = 6
"""One in this many architectures is held out, to choose the epoch and to calibrate."""
CHUNK: Final = 8
"""Jobs of this many batches are sorted by length before they are split into batches, to reduce
padding."""


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """Sizes and schedule of one training run.

    Attributes:
        width, depth, heads: sizes of the encoder.
        hidden, components: hidden width and mixture components of the head.
        epochs, batch_rows, learning_rate, weight_decay: settings of AdamW with a one-cycle
        schedule.
        seed: seed of initialisation, order and folds.
    """

    width: int = 16
    depth: int = 2
    heads: int = 2
    hidden: int = 96
    components: int = 3
    epochs: int = 25
    batch_rows: int = 64
    learning_rate: float = 4e-3
    weight_decay: float = 0.3
    seed: int = 0


def transformer_plan(seed: int, epochs: int | None = None) -> SequencePlan:
    """Return the plan of the transformer-based classifier."""
    plan = SequencePlan(seed=seed)
    return replace(plan, epochs=epochs or plan.epochs)


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Training data of ``B`` jobs.

    Attributes:
        inputs, reference, units: outputs of the transform, ``[B, D]`` and twice ``[B, 1]``.
        sequences: unpadded layer sequences.
        lower, upper: label intervals in units of the closed form's error, ``[B]``.
    """

    inputs: Tensor
    reference: Tensor
    units: Tensor
    sequences: list[NDArray[np.float32]]
    lower: Tensor
    upper: Tensor


def train_sequence_classifier(
    data: LabelledJobs,
    plan: SequencePlan | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> TrainedClassifier:
    """Train a classifier on ``data``; all jobs must have layers.

    Raises:
        InvalidJobError: when a job has totals only.
        ValueError: when there are too few architectures to hold some out.
    """
    plan = plan or SequencePlan()
    transform = fitted_transform(data, data.without_layers())
    folds = fold_numbers(data.groups, HELD_OUT, plan.seed)
    inputs = transform.width + encoder_width(plan.width)
    members = MemberMLPs(inputs, 1, plan.hidden, plan.components, plan.seed)
    network = SequenceNetwork(initialised(plan.width, plan.depth, plan.heads, plan.seed), members)
    rows = _rows(transform, data)
    held_out = np.flatnonzero(folds == 0)
    best_epoch = _fit(network, rows, np.flatnonzero(folds != 0), held_out, plan, progress)

    # of all jobs, not of the held-out sixth, with which a small dataset would have no bound at 99 %
    # at all; where the sixth is too small for a coverage, its bound is twice the largest score, and
    # every evaluation measures the coverage that results
    coverages = calibrated_coverages(data)
    errors = _errors(network, rows, data, held_out)
    constant = added_spread([errors])
    multiples = multiples_by_family(
        "layers", conformal_scores(errors, constant), data.take(held_out), coverages
    )
    # jobs with totals only have no sequence: their groups exist because the graph needs them
    every_group = multiples | {
        group.replace("layers", "totals"): found for group, found in multiples.items()
    }
    head = MixtureHead(members, transform, every_group, constant)
    scales = {
        family: extrapolation_scale(data.take(some), LAYER_TERMS)
        for family, some in data.rows_by_family().items()
    }
    served = SequenceClassifier(SequenceInputs(transform, network.encoder), head).eval()
    return TrainedClassifier(served, members, coverages, multiples, constant, scales, (best_epoch,))


def _rows(transform: FeatureTransform, data: LabelledJobs) -> _Rows:
    with torch.no_grad():
        inputs_BD, reference_B1, units_B1, _ = transform(float_tensor(data.features))
    return _Rows(
        inputs_BD, reference_B1, units_B1, _sequences(data), *label_interval(transform, data)
    )


def _sequences(data: LabelledJobs) -> list[NDArray[np.float32]]:
    """Return the sequences one by one, so that a long network does not pad all others."""
    return [layer_sequence(data.jobs[row : row + 1])[0][0] for row in range(len(data))]


def batch_of(sequences: Sequence[NDArray[np.float32]]) -> tuple[Tensor, Tensor]:
    """Return the sequences padded to the longest, ``[B, L, F]``, and their mask as floats, ``[B,
    L]``."""
    longest = max(map(len, sequences))
    padded = np.zeros((len(sequences), longest, sequences[0].shape[1]), dtype=np.float32)
    mask = np.zeros((len(sequences), longest), dtype=np.float32)
    for row, sequence in enumerate(sequences):
        padded[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = 1.0
    return torch.from_numpy(padded), torch.from_numpy(mask)


def _batches(
    rows: NDArray[np.int64], lengths: NDArray[np.int64], size: int, order: np.random.Generator
) -> Iterator[NDArray[np.int64]]:
    shuffled = order.permutation(rows)
    batches = []
    for start in range(0, len(shuffled), size * CHUNK):
        chunk = shuffled[start : start + size * CHUNK]
        chunk = chunk[np.argsort(lengths[chunk], kind="stable")]
        batches += [chunk[first : first + size] for first in range(0, len(chunk), size)]
    for index in order.permutation(len(batches)):
        yield batches[index]


def _fit(
    network: SequenceNetwork,
    rows: _Rows,
    training: NDArray[np.int64],
    held_out: NDArray[np.int64],
    plan: SequencePlan,
    progress: Callable[[float], None],
) -> int:
    order = np.random.default_rng(plan.seed)
    lengths = np.array([len(sequence) for sequence in rows.sequences])
    chunk = plan.batch_rows * CHUNK
    whole, rest = divmod(len(training), chunk)
    steps = whole * CHUNK + math.ceil(rest / plan.batch_rows)
    decayed = [parameter for parameter in network.parameters() if parameter.ndim >= 2]
    optimization = Optimization(network, decayed, plan, steps)
    best_loss, best_epoch = math.inf, 0
    best_state = {name: value.clone() for name, value in network.state_dict().items()}
    for epoch in range(plan.epochs):
        for batch in _batches(training, lengths, plan.batch_rows, order):
            optimization.step(_loss(network, rows, batch).mean())
        with torch.no_grad():
            ordered = held_out[np.argsort(lengths[held_out], kind="stable")]
            parts = [
                _loss(network, rows, ordered[first : first + 256])
                for first in range(0, len(ordered), 256)
            ]
            loss_value = float(torch.cat(parts).mean())
        if loss_value < best_loss:
            best_loss, best_epoch = loss_value, epoch
            best_state = {name: value.clone() for name, value in network.state_dict().items()}
        progress((epoch + 1) / plan.epochs)
    network.load_state_dict(best_state)
    return best_epoch


def _loss(network: SequenceNetwork, rows: _Rows, batch: NDArray[np.int64]) -> Tensor:
    """Return the negative log-probability of each label's interval, shape ``[B]``."""
    places = torch.from_numpy(batch)
    mixture = _mixture(network, rows, batch)
    upper, lower = rows.upper[places, None], rows.lower[places, None]
    return -(mixture_cdf(mixture, upper) - mixture_cdf(mixture, lower)).clamp_min(1e-7).log()[:, 0]


def _mixture(network: SequenceNetwork, rows: _Rows, batch: NDArray[np.int64]) -> Mixture:
    places = torch.from_numpy(batch)
    sequences = batch_of([rows.sequences[row] for row in batch.tolist()])
    mixture: Mixture = network(rows.inputs[places], rows.reference[places], *sequences)
    return mixture


def _errors(
    network: SequenceNetwork, rows: _Rows, data: LabelledJobs, held_out: NDArray[np.int64]
) -> Errors:
    """Return the errors on the held-out jobs."""
    parts = []
    for first in range(0, len(held_out), 256):
        part = held_out[first : first + 256]
        reference_B1, units_B1 = (
            column[torch.from_numpy(part)] for column in (rows.reference, rows.units)
        )
        with torch.no_grad():
            centre, spread = centre_and_spread(
                *(amount[:, 0] for amount in _mixture(network, rows, part))
            )
        parts.append(
            torch.cat((reference_B1 + centre * units_B1, spread * units_B1, units_B1), dim=1)
        )
    return errors_of(data.take(held_out), *torch.cat(parts).double().numpy().T)
