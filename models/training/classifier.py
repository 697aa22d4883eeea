"""Trains a classifier: line, correction, bounds.

The line is fitted first and fixed.  Then ``folds`` networks are trained, each without one fold of
the architecture families.  Each row is scored by the network that has not seen its family, in
units of the predicted spread (:func:`gpumemnet.predict.conformal.conformal_bounds`).  This follows cross-conformal
prediction (Vovk, Annals of Mathematics and Artificial Intelligence 74, 2015).  The MLP-based
classifier is the ensemble of these networks; the transformer-based one is trained once more, on all
rows.  Since these are not what was scored, every evaluation measures the coverage on families that
were in no training.

Training pulls the correction to zero, so that where the data say nothing about a family that was
held out, the line answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from gpumemnet.job.job_table import Array, Flags, Indices
from gpumemnet.predict.conformal import (
    COVERAGES,
    FEWEST_SCORES,
    conformal_bounds,
    weighted_quantile,
)
from gpumemnet.predict.features import FEATURE_NAMES, layer_sequence
from gpumemnet.predict.predictor import SLACK_BYTES

from ..networks.inference import (
    Classifier,
    LayerEncoder,
    MixtureHead,
    initialised,
)
from ..networks.line import (
    GROUP_NAMES,
    GROUPS,
    SLOPE_BOUNDS,
    TOTALS_SLOPE_BOUNDS,
    fit_slopes,
)
from ..networks.mlp import MOST_SPREAD, Inputs, MemberMLPs, Mixture, centre_and_spread, mixture_cdf
from .data import LabelledJobs, fold_numbers

SHORTEST_SCHEDULE: Final = 20
"""Fewest steps of a one-cycle schedule; with fewer, its warm-up, the first tenth, would be
empty."""
ABOVE_EVERY_LABEL: Final = 1e6
"""A value above every label, in units of the line's error."""
FEWEST_FAMILIES: Final = 8
"""Fewest architecture families with which a group has a centre of its own."""
LEAST_UNIT: Final = 1e-3
"""Smallest typical error of a group, for groups whose errors are all equal."""
CHUNK: Final = 8
"""Jobs of this many batches are sorted by length before they are split into batches, to reduce
padding."""
JOBS_AT_ONCE: Final = 256
"""Jobs whose sequences are computed together."""


@dataclass(frozen=True)
class TrainingPlan:
    """Sizes and schedule of one training run.

    Attributes:
        encoder: ``mlp`` or ``transformer``.
        folds: networks that are trained without a fold of the families.
        hidden, components: width of the hidden layers, and mixture components, of each network.
        width, depth, heads: sizes of the transformer.
        epochs, batch_rows, learning_rate, weight_decay: settings of AdamW with a one-cycle
            schedule.
        pull: weight of the squared correction in the loss.
        seed: seed of initialisation, order and folds.
    """

    encoder: str = "mlp"
    folds: int = 5
    hidden: int = 64
    components: int = 3
    width: int = 16
    depth: int = 2
    heads: int = 2
    epochs: int = 12
    batch_rows: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 0.3
    pull: float = 0.3
    seed: int = 0


PLANS: Final = {
    "mlp": TrainingPlan(),
    "transformer": TrainingPlan(encoder="transformer", folds=3, epochs=4, batch_rows=64),
}


@dataclass(frozen=True, eq=False)
class TrainedClassifier:
    """The result of training.

    Attributes:
        network: the whole network that is exported, in evaluation mode.
        plan: how it was trained.
        multiples: bounds of each group in units of the spread with the constant added, shape ``[G,
            C]``.
        added_spread: constant added to every spread, in units of the line's error.
        scored_rows: rows that each group's bounds are from, shape ``[G]``.
    """

    network: Classifier
    plan: TrainingPlan
    multiples: Array
    added_spread: float
    scored_rows: Indices


def plan_of(encoder: str, seed: int = 0, epochs: int | None = None) -> TrainingPlan:
    """Return the plan of an encoder; ``epochs`` replaces the plan's value if given."""
    plan = PLANS[encoder]
    return replace(plan, seed=seed, epochs=epochs or plan.epochs)


def train(
    data: LabelledJobs,
    plan: TrainingPlan,
    progress: Callable[[float], None] = lambda share: None,
) -> TrainedClassifier:
    """Train the classifier that ``plan`` describes.

    Args:
        data: jobs; for the transformer those with layers count.
        plan: sizes and schedule.
        progress: called with the share of the work that is finished.

    Raises:
        DatasetError: when there are too few architectures to hold some out.
    """
    torch.set_num_threads(1)  # the networks are too small to benefit from a second thread
    is_sequence = plan.encoder == "transformer"
    with_layers = data.take(data.jobs.layer_counts > 0)
    totals = data.without_layers()
    inputs = fitted_inputs(data, totals)
    parts = [with_layers] if is_sequence else [with_layers, totals]
    rows = _Rows.of(inputs, parts, is_sequence)
    folds = fold_numbers(rows.groups, plan.folds, plan.seed)
    everything = np.arange(len(folds))
    if is_sequence:
        steps = plan.folds + 1
        found = torch.zeros(len(folds), 2)
        for fold in range(plan.folds):
            network = _network(inputs, plan)
            _fit(network, rows, [np.flatnonzero(folds != fold)], plan, _part(progress, fold, steps))
            own = np.flatnonzero(folds == fold)
            found[torch.from_numpy(own)] = _scored(network, rows, own)[:, 0]
        network = _network(inputs, plan)
        _fit(network, rows, [everything], plan, _part(progress, plan.folds, steps))
    else:
        network = _network(inputs, plan)
        training = [np.flatnonzero(folds != fold) for fold in range(plan.folds)]
        _fit(network, rows, training, plan, progress)
        every = _scored(network, rows, everything)
        found = every[torch.arange(len(folds)), torch.from_numpy(folds)]
    centres, spreads = found.double().numpy().T
    spreads = np.minimum(spreads, MOST_SPREAD)
    errors = rows.label - centres
    is_scored = rows.calibrates & np.isfinite(errors)
    if not is_scored.any():
        is_scored = np.isfinite(errors)
    added = float(np.abs(errors[is_scored]).mean())
    scores = errors / (spreads + added)
    multiples, counts = _grouped_bounds(scores, rows.codes, is_scored, rows.groups)
    head = MixtureHead(
        network.members, inputs, torch.from_numpy(multiples.astype(np.float32)), added
    )
    served = Classifier(inputs, head, network.encoder)
    return TrainedClassifier(served.eval(), plan, multiples, added, counts)


def _part(progress: Callable[[float], None], step: int, steps: int) -> Callable[[float], None]:
    return lambda share: progress((step + share) / steps)


# The line.


def fitted_inputs(data: LabelledJobs, totals: LabelledJobs) -> Inputs:
    """Fit both lines, and each group's shift and typical error; standardise the inputs."""
    inputs = Inputs()
    line = inputs.line.double()
    half = len(FEATURE_NAMES)
    is_measured = np.flatnonzero(data.is_measured)
    weights = data.weights[is_measured]
    labels = data.label_bytes[is_measured]
    own = torch.from_numpy(data.features[is_measured, :half])
    checkpointed = own[:, [FEATURE_NAMES.index("is_checkpointed")]]
    has_layers = data.jobs.layer_counts[is_measured] > 0
    scales = labels + SLACK_BYTES
    for slopes, terms, rows, bounds in (
        (line.slopes, line.terms(own, checkpointed), has_layers, SLOPE_BOUNDS),
        (
            line.totals_slopes,
            line.totals_terms(torch.from_numpy(totals.features[is_measured, :half])),
            np.ones(len(labels), dtype=np.bool_),
            TOTALS_SLOPE_BOUNDS,
        ),
    ):
        if rows.any():
            found = fit_slopes(
                terms.numpy()[rows], labels[rows], scales[rows], weights[rows], bounds
            )
            slopes.copy_(torch.from_numpy(found)[:, None])
    codes, errors, families = [], [], data.groups[is_measured]
    for features in (data.features, totals.features):
        both = torch.from_numpy(features[is_measured])
        amounts, groups = line(both[:, :half], both[:, half:])
        codes.append(groups.argmax(1).numpy())
        errors.append(np.log(scales / (amounts[:, 0].numpy() + SLACK_BYTES)))
    codes[0], errors[0] = codes[0][has_layers], errors[0][has_layers]
    weights = np.concatenate((weights[has_layers], weights))
    families = np.concatenate((families[has_layers], families))
    _set_centres(inputs, np.concatenate(codes), np.concatenate(errors), weights, families)
    inputs.line.float()
    with torch.no_grad():
        inputs.fit(inputs.raw(float_tensor(data.features[:, half:]), torch.zeros(len(data), 1))[0])
    return inputs


def _set_centres(
    inputs: Inputs, codes: Indices, errors: Array, weights: Array, families: NDArray[np.str_]
) -> None:
    """Set median and typical error of each group; one with too few rows or architecture families
    takes those of the group without regard to ``cudnn.benchmark``, or of all: what few families
    have in common says nothing of another."""
    fewest = min(FEWEST_FAMILIES, len(np.unique(families)))
    for code in range(len(GROUP_NAMES)):
        rows = next(
            rows
            for rows in _wider_and_wider(codes, code)
            if rows.sum() >= min(FEWEST_SCORES, len(codes))
            and len(np.unique(families[rows])) >= fewest
        )
        shift = weighted_quantile(errors[rows], weights[rows], 0.5)
        distances = np.abs(errors[rows] - shift)
        inputs.shifts[code] = shift
        inputs.units[code] = max(weighted_quantile(distances, weights[rows], 0.68), LEAST_UNIT)


def _wider_and_wider(codes: Indices, code: int) -> list[Flags]:
    """Indices of a group, of the same group with and without ``cudnn.benchmark``, of all with layers
    or of all with totals, and of all."""
    count = len(GROUPS)
    mode, group = code // (2 * count), code % count
    is_mode = codes // (2 * count) == mode
    return [
        codes == code,
        is_mode & (codes % count == group),
        is_mode,
        np.ones(len(codes), dtype=np.bool_),
    ]


def _grouped_bounds(
    scores: Array, codes: Indices, is_scored: Flags, families: NDArray[np.str_]
) -> tuple[Array, Indices]:
    """Return the bounds of each group, and how many rows they are from; those of a group with few
    architecture families are no narrower than those of all."""
    bounds, counts = [], []
    fewest = min(FEWEST_SCORES, int(is_scored.sum()))
    for code in range(len(GROUP_NAMES)):
        parts = [rows & is_scored for rows in _wider_and_wider(codes, code)[1:]]
        parts = [rows for rows in parts if rows.sum() >= fewest]
        own = [conformal_bounds(scores[rows], COVERAGES, least=1.0) for rows in parts[:2]]
        is_varied = len(np.unique(families[parts[0]])) >= FEWEST_FAMILIES
        bounds.append(own[0] if is_varied else np.max(own, axis=0))
        counts.append(int(parts[0].sum()))
    return np.array(bounds), np.array(counts)


# The networks.


@dataclass(frozen=True, eq=False)
class _Rows:
    """Training data of ``B`` jobs, as the networks read it.

    Attributes:
        inputs: shape ``[B, D]``.
        lower, upper: label intervals around the line, in units of the line's error, ``[B]``.
        label: the labels in the same units, NaN where they are censored.
        weights: of the rows.
        codes: positions of their groups.
        groups: what folds keep together.
        calibrates: whether bounds are calibrated on the row.
        sequences: the different layer sequences, unpadded; empty for the MLP-based classifier.
        sequence_numbers: position of each row's sequence among them.
    """

    inputs: Tensor
    lower: Tensor
    upper: Tensor
    label: Array
    weights: Tensor
    codes: Indices
    groups: NDArray[np.str_]
    calibrates: Flags
    sequences: list[NDArray[np.float32]]
    sequence_numbers: Indices

    @staticmethod
    def of(inputs: Inputs, parts: Sequence[LabelledJobs], has_sequences: bool) -> _Rows:
        """The rows of all parts, one after the other."""
        columns: list[tuple[Tensor, ...]] = []
        for part in parts:
            with torch.no_grad():
                inputs_BD, centre_B1, units_B1, groups_BG = inputs(float_tensor(part.features))
            centre, units = centre_B1[:, 0].double(), units_B1[:, 0].double()
            relative = [
                (torch.from_numpy(edge + SLACK_BYTES).log() - centre) / units
                for edge in (part.lower_bytes, part.upper_bytes, part.label_bytes)
            ]
            # a job that ran out of memory has no upper edge; with infinity, the gradient of a scale
            # would be 0 times infinity
            relative[1] = relative[1].clamp_max(ABOVE_EVERY_LABEL)
            columns.append((inputs_BD, *relative, groups_BG.argmax(1)))
        inputs_BD, lower, upper, label, codes = map(torch.cat, zip(*columns, strict=True))
        found: dict[bytes, tuple[int, NDArray[np.float32]]] = {}
        numbers = [
            found.setdefault(one.tobytes(), (len(found), one))[0]
            for part in (parts if has_sequences else ())
            for one in sequences_of(part)
        ]
        return _Rows(
            inputs=inputs_BD,
            lower=lower.float(),
            upper=upper.float(),
            label=label.numpy(),
            weights=torch.from_numpy(np.concatenate([part.weights for part in parts])).float(),
            codes=codes.numpy(),
            groups=np.concatenate([part.groups for part in parts]),
            calibrates=np.concatenate([part.calibrates for part in parts]),
            sequences=[one for _, one in found.values()],
            sequence_numbers=np.array(numbers, dtype=np.int64),
        )


def sequences_of(data: LabelledJobs) -> list[NDArray[np.float32]]:
    """Return the sequences one by one, so that a long network does not pad all others."""
    found: list[NDArray[np.float32]] = []
    for at in range(0, len(data), JOBS_AT_ONCE):
        sequences, mask = layer_sequence(data.jobs[at : at + JOBS_AT_ONCE])
        found.extend(sequences[row, own] for row, own in enumerate(mask))
    return found


class _Network(nn.Module):
    """Encoder and members in training."""

    def __init__(self, encoder: LayerEncoder | None, members: MemberMLPs) -> None:
        super().__init__()
        self.encoder = encoder
        self.members = members

    def forward(self, rows: _Rows, places_EB: Tensor) -> Mixture:
        """Return each member's mixture for its own rows, ``[B, E, K]`` each."""
        inputs_EBD = rows.inputs[places_EB]
        if self.encoder is not None:
            numbers = rows.sequence_numbers[places_EB[0].numpy()]
            own, order = np.unique(numbers, return_inverse=True)
            pooled = self.encoder(*batch_of([rows.sequences[number] for number in own]))
            pooled = pooled[torch.from_numpy(order)]
            inputs_EBD = torch.cat((inputs_EBD, pooled.unsqueeze(0)), dim=2)
        return self.members(inputs_EBD)


def _network(inputs: Inputs, plan: TrainingPlan) -> _Network:
    encoder = None
    width, members = inputs.width, plan.folds
    if plan.encoder == "transformer":
        encoder = initialised(plan.width, plan.depth, plan.heads, plan.seed)
        width, members = width + 2 * plan.width, 1  # the encoder's mean and maximum
    return _Network(encoder, MemberMLPs(width, members, plan.hidden, plan.components, plan.seed))


def batch_of(sequences: Sequence[NDArray[np.float32]]) -> tuple[Tensor, Tensor]:
    """Return the sequences padded to the longest, ``[B, L, F]``, and their mask as floats, ``[B,
    L]``."""
    rows = [torch.from_numpy(sequence) for sequence in sequences]
    ones = [torch.ones(len(row)) for row in rows]
    return pad_sequence(rows, batch_first=True), pad_sequence(ones, batch_first=True)


def _batches(
    training: Sequence[Indices], rows: _Rows, size: int, order: np.random.Generator
) -> list[Tensor]:
    """Return the places of an epoch's batches, ``[E, size]`` each.

    Those of sequences hold jobs of about the same length, and jobs of one sequence together: they
    differ in batch size or optimizer, and the encoder reads their layers once.
    """
    count = min(map(len, training))
    shuffled = np.stack([order.permutation(own)[:count] for own in training])
    if rows.sequences:
        numbers = rows.sequence_numbers[shuffled[0]]
        ranks = order.permutation(len(rows.sequences))[numbers]
        lengths = np.array([len(rows.sequences[number]) for number in numbers])
        chunks = np.empty(count, dtype=np.int64)
        chunks[np.argsort(ranks, kind="stable")] = np.arange(count) // (size * CHUNK)
        shuffled = shuffled[:, np.lexsort((ranks, lengths, chunks))]
    batches = [torch.from_numpy(shuffled[:, at : at + size]) for at in range(0, count, size)]
    return [batches[index] for index in order.permutation(len(batches))]


def _fit(
    network: _Network,
    rows: _Rows,
    training: Sequence[Indices],
    plan: TrainingPlan,
    progress: Callable[[float], None],
) -> None:
    """Train each member on its rows, by AdamW with a one-cycle schedule."""
    order = np.random.default_rng(plan.seed)
    decayed = [parameter for parameter in network.parameters() if parameter.ndim >= 2]
    decayed = [parameter for parameter in decayed if parameter.shape[-2] > 1]
    names = {id(parameter) for parameter in decayed}
    others = [one for one in network.parameters() if id(one) not in names]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": plan.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=plan.learning_rate,
    )
    steps = plan.epochs * math.ceil(min(map(len, training)) / plan.batch_rows)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, plan.learning_rate, max(steps, SHORTEST_SCHEDULE), pct_start=0.1
    )
    for epoch in range(plan.epochs):
        for places_EB in _batches(training, rows, plan.batch_rows, order):
            optimizer.zero_grad()
            _loss(network, rows, places_EB, plan.pull).sum().backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(network.parameters(), 5.0)
            optimizer.step()
            schedule.step()
        progress((epoch + 1) / plan.epochs)


def _loss(network: _Network, rows: _Rows, places_EB: Tensor, pull: float) -> Tensor:
    """Return each member's mean negative log-probability of the label intervals, with the pull of
    its correction to zero, shape ``[E]``.

    The former is the cross-entropy for bins as wide as a reading.
    """
    mixture = network(rows, places_EB)
    upper_BE, lower_BE = rows.upper[places_EB].T, rows.lower[places_EB].T
    probability_BE = mixture_cdf(mixture, upper_BE) - mixture_cdf(mixture, lower_BE)
    centre_BE = centre_and_spread(*mixture)[0][..., 0]
    losses_BE = pull * centre_BE**2 - probability_BE.clamp_min(1e-7).log()
    return (losses_BE * rows.weights[places_EB].T).mean(0)


def _scored(network: _Network, rows: _Rows, places: Indices) -> Tensor:
    """Return centre and spread of each member for the rows at ``places``, ``[B, E, 2]``."""
    parts = []
    with torch.no_grad():
        for own in torch.split(torch.from_numpy(places), 256):
            parts.append(torch.cat(centre_and_spread(*network(rows, own[None])), dim=-1))
    return torch.cat(parts)


def float_tensor(values: Array) -> Tensor:
    """Convert features to single precision, the type of the graph's inputs."""
    return torch.from_numpy(values.astype(np.float32))
