"""Trains the MLP-based classifier and calibrates its safe bytes.

Each member of the ensemble holds out one fold of the training rows.  It stops at its best epoch on
that fold, and is calibrated on it in units of the predicted spread
(:mod:`models.training.bounds`).  This follows cross-conformal prediction (Vovk, Annals of
Mathematics and Artificial Intelligence 74, 2015).  Its guarantee does not apply exactly: the fold
also chooses the epoch and the added spread, and the served bound combines all members.  So every
evaluation measures the coverage on held-out folds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpumemnet.units import MIB

from ..networks.inference import MixtureClassifier, MixtureHead, SequenceClassifier
from ..networks.mlp import (
    FeatureTransform,
    MemberMLPs,
    centre_and_spread,
    float_tensor,
    mixture_cdf,
)
from ..networks.physics_line import LAYER_TERMS, TOTALS_TERMS, PhysicsLine, fit_line
from .bounds import (
    Errors,
    added_spread,
    calibrated_coverages,
    conformal_scores,
    errors_of,
    multiples_by_family,
)
from .data import LabelledJobs, fold_numbers

if TYPE_CHECKING:
    from .sequence import SequencePlan

SHORTEST_SCHEDULE: Final = 20
"""Fewest steps of a one-cycle schedule; with fewer, its warm-up, the first tenth, would be
empty."""
ABOVE_EVERY_LABEL: Final = 1e6
"""A value above every label, in units of the closed form's error."""
TOTALS_COPIES: Final = 2
"""Number of copies with totals only of each training job, besides the one with its layers."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Sizes and schedule of one training run.

    Attributes:
        members, hidden, components: members of the ensemble, their hidden width, and their mixture
            components.
        epochs, batch_rows, learning_rate, weight_decay: settings of AdamW with a one-cycle
        schedule.
        seed: seed of initialisation, order and folds.
    """

    members: int = 5
    hidden: int = 48
    components: int = 3
    epochs: int = 80
    batch_rows: int = 128
    learning_rate: float = 4e-3
    weight_decay: float = 0.3
    seed: int = 0


MANY_OPTIONS: Final = TrainingPlan(hidden=96, epochs=12)
"""For jobs of many optimizers and precisions: more options need wider networks and fewer epochs."""
COMMON: Final = TrainingPlan(hidden=128, epochs=12)
"""For jobs of several families."""


def mlp_plan(data: LabelledJobs, seed: int, epochs: int | None = None) -> TrainingPlan:
    """Return the plan of the MLP-based classifier for ``data``; ``epochs`` replaces the plan's
    value if given."""
    if len(data.families) > 1:
        return common_plan(seed, epochs)
    names = ("optimizer", "precision", "checkpointing")
    has_many = any(len(set(data.jobs.option_column(name))) > 1 for name in names)
    plan = MANY_OPTIONS if has_many else TrainingPlan()
    return replace(plan, seed=seed, epochs=epochs or plan.epochs)


def common_plan(seed: int, epochs: int | None = None) -> TrainingPlan:
    """Return the plan of the MLP-based classifier for all families."""
    return replace(COMMON, seed=seed, epochs=epochs or COMMON.epochs)


@dataclass(frozen=True, slots=True, eq=False)
class TrainedClassifier:
    """The result of training: the network, its calibration, and values for the card.

    Attributes:
        network: the whole network that is exported, in evaluation mode.
        members: its members as they were trained.
        coverages: coverages of the graph's bounds.
        multiples: one of :func:`models.networks.mlp.group_names` → the multiple of the spread, with
            the constant added, for each coverage.
        added_spread: constant added to every spread, in units of the closed form's error.
        range_log_scales: family → scale of the closed form's error beyond the sizes that it was
            fitted to, in log-bytes; the empty name where there is a single family.
        best_epochs: the epoch at which each member stopped.
    """

    network: MixtureClassifier | SequenceClassifier
    members: MemberMLPs
    coverages: tuple[float, ...]
    multiples: Mapping[str, tuple[float, ...]]
    added_spread: float
    range_log_scales: Mapping[str, float]
    best_epochs: tuple[int, ...]


def train_classifier(
    data: LabelledJobs,
    plan: TrainingPlan | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> TrainedClassifier:
    """Train a classifier on ``data``; with several families it is a common model.

    Args:
        data: jobs with layers.
        plan: sizes and schedule.
        progress: called with the share of epochs that are finished.

    Raises:
        ValueError: when there are fewer architectures than members.
    """
    plan = plan or TrainingPlan()
    totals = data.without_layers()
    transform = fitted_transform(data, totals)
    members = MemberMLPs(transform.width, plan.members, plan.hidden, plan.components, plan.seed)
    folds = fold_numbers(data.groups, plan.members, plan.seed)
    parts = [_rows(transform, jobs) for jobs in (data, *[totals] * TOTALS_COPIES)]
    rows = [torch.cat(columns) for columns in zip(*parts, strict=True)]
    best_epochs = _fit(members, rows, np.tile(folds, 1 + TOTALS_COPIES), plan, progress)

    calibrated = data.calibration_rows
    tested = data.take(calibrated)
    coverages = calibrated_coverages(tested)
    errors = {
        mode: _errors(transform, members, jobs.take(calibrated), folds[calibrated])
        for mode, jobs in (("layers", data), ("totals", totals))
    }
    constant = added_spread(list(errors.values()))
    multiples: dict[str, tuple[float, ...]] = {}
    for mode, mode_errors in errors.items():
        multiples |= multiples_by_family(
            mode, conformal_scores(mode_errors, constant), tested, coverages
        )
    head = MixtureHead(members, transform, multiples, constant)
    scales = {
        family: max(
            extrapolation_scale(data.take(some), LAYER_TERMS),
            extrapolation_scale(totals.take(some), TOTALS_TERMS),
        )
        for family, some in data.rows_by_family().items()
    }
    network = MixtureClassifier(transform, head).eval()
    return TrainedClassifier(network, members, coverages, multiples, constant, scales, best_epochs)


def fitted_transform(data: LabelledJobs, totals: LabelledJobs) -> FeatureTransform:
    """Fit lines to ``data`` and to ``totals``, the same jobs with totals only; standardise the
    inputs of ``data``."""
    transform = _with_lines(data, totals)
    transform.fit(transform.raw_inputs(float_tensor(data.features)))
    return transform


class Optimization:
    """AdamW with a one-cycle schedule, and gradients of at most norm 5."""

    def __init__(
        self,
        network: nn.Module,
        decayed: Sequence[nn.Parameter],
        plan: TrainingPlan | SequencePlan,
        steps: int,
    ) -> None:
        """Prepare the training of ``network``; weights decay in ``decayed`` only.

        Args:
            network: the network.
            decayed: those of its parameters that decay.
            plan: the settings.
            steps: number of steps of an epoch.
        """
        self._network = network
        names = {id(parameter) for parameter in decayed}
        others = [one for one in network.parameters() if id(one) not in names]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": list(decayed), "weight_decay": plan.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=plan.learning_rate,
        )
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer,
            plan.learning_rate,
            max(plan.epochs * steps, SHORTEST_SCHEDULE),
            pct_start=0.1,
        )

    def step(self, loss: Tensor) -> None:
        """Change the parameters by one step against the gradient of ``loss``."""
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), 5.0)
        self._optimizer.step()
        self._schedule.step()


def _with_lines(data: LabelledJobs, totals: LabelledJobs) -> FeatureTransform:
    lines, errors = [], []
    rows_by_family = data.rows_by_family()
    for rows in rows_by_family.values():
        for jobs, terms in ((data.take(rows), LAYER_TERMS), (totals.take(rows), TOTALS_TERMS)):
            lines.append(fit_line(jobs.features, jobs.label_bytes, terms))
            errors.append(_typical_error(lines[-1], jobs))
    return FeatureTransform(lines, errors, data.families if len(rows_by_family) > 1 else ())


def _log_errors(line: PhysicsLine, data: LabelledJobs) -> NDArray[np.float64]:
    known = ~np.isnan(data.label_bytes)
    errors: NDArray[np.float64] = np.abs(
        np.log(data.label_bytes[known] / line.predict_bytes(data.features[known]))
    )
    return errors


def _typical_error(line: PhysicsLine, data: LabelledJobs) -> float:
    return max(float(np.percentile(_log_errors(line, data), 68)), 1e-4)


def _rows(transform: FeatureTransform, data: LabelledJobs) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs ``[B, D]`` and the label's interval, lower and upper ``[B]``, in units of the
    closed form's error."""
    with torch.no_grad():
        inputs_BD, _, _, _ = transform(float_tensor(data.features))
    return inputs_BD, *label_interval(transform, data)


def label_interval(transform: FeatureTransform, data: LabelledJobs) -> tuple[Tensor, Tensor]:
    """Return the label's interval, lower and upper ``[B]``, in units of the closed form's error."""
    with torch.no_grad():
        _, reference_B1, units_B1, _ = transform(float_tensor(data.features))
    reference, units = reference_B1[:, 0].double().numpy(), units_B1[:, 0].double().numpy()
    lower, upper = (
        (np.log(edge) - reference) / units for edge in (data.lower_bytes, data.upper_bytes)
    )
    # a job that ran out of memory has no upper edge; with infinity, the gradient of a scale would
    # be 0 times infinity
    upper = np.minimum(upper, ABOVE_EVERY_LABEL)
    return torch.from_numpy(lower.astype(np.float32)), torch.from_numpy(upper.astype(np.float32))


def _loss(members: MemberMLPs, inputs_EBD: Tensor, lower_EB: Tensor, upper_EB: Tensor) -> Tensor:
    """Return each member's mean negative log-probability of the label intervals, shape ``[E]``.

    This is the cross-entropy for bins as wide as a reading.
    """
    mixture = members(inputs_EBD)
    probability_BE = mixture_cdf(mixture, upper_EB.T) - mixture_cdf(mixture, lower_EB.T)
    return -probability_BE.clamp_min(1e-7).log().mean(0)


def _fit(
    members: MemberMLPs,
    rows: list[Tensor],
    folds: NDArray[np.int64],
    plan: TrainingPlan,
    progress: Callable[[float], None],
) -> tuple[int, ...]:
    inputs_BD, lower_B, upper_B = rows
    order = np.random.default_rng(plan.seed)
    training = [np.flatnonzero(folds != member) for member in range(plan.members)]
    held_out = [np.flatnonzero(folds == member) for member in range(plan.members)]
    training_rows, held_out_rows = min(map(len, training)), min(map(len, held_out))
    held_out_EV = torch.from_numpy(np.stack([rows_[:held_out_rows] for rows_ in held_out]))

    steps = math.ceil(training_rows / plan.batch_rows)
    optimization = Optimization(members, list(members.weights), plan, steps)
    best_loss_E = torch.full((plan.members,), torch.inf)
    best_epoch_E = torch.zeros(plan.members, dtype=torch.int64)
    best_state = [parameter.detach().clone() for parameter in members.parameters()]
    for epoch in range(plan.epochs):
        shuffled_ET = torch.from_numpy(
            np.stack([order.permutation(rows_)[:training_rows] for rows_ in training])
        )
        for step in range(steps):
            batch_EB = shuffled_ET[:, step * plan.batch_rows : (step + 1) * plan.batch_rows]
            loss = _loss(members, inputs_BD[batch_EB], lower_B[batch_EB], upper_B[batch_EB])
            optimization.step(loss.sum())
        with torch.no_grad():
            loss_E = _loss(
                members, inputs_BD[held_out_EV], lower_B[held_out_EV], upper_B[held_out_EV]
            )
            better_E = loss_E < best_loss_E
            best_loss_E[better_E] = loss_E[better_E]
            best_epoch_E[better_E] = epoch
            for saved, parameter in zip(best_state, members.parameters(), strict=True):
                saved[better_E] = parameter[better_E]
        progress((epoch + 1) / plan.epochs)
    with torch.no_grad():
        for saved, parameter in zip(best_state, members.parameters(), strict=True):
            parameter.copy_(saved)
    return tuple(best_epoch_E.tolist())


def _errors(
    transform: FeatureTransform, members: MemberMLPs, data: LabelledJobs, folds: NDArray[np.int64]
) -> Errors:
    """Return the error of each job, predicted by the member that did not train on it."""
    with torch.no_grad():
        inputs_BD, reference_B1, units_B1, _ = transform(float_tensor(data.features))
        untrained = (torch.arange(len(folds)), torch.from_numpy(folds))
        centre_B1, spread_B1 = centre_and_spread(
            *(part[untrained] for part in members(inputs_BD.unsqueeze(0)))
        )
    columns = (reference_B1 + centre_B1 * units_B1, spread_B1 * units_B1, units_B1)
    return errors_of(data, *(column[:, 0].double().numpy() for column in columns))


def extrapolation_scale(data: LabelledJobs, terms: Sequence[Sequence[str]]) -> float:
    """Return the scale of the closed form's error on jobs larger than those that it was fitted to,
    in log-bytes.

    The closed form is fitted to the smaller half of the jobs and tested on the larger half.  The
    scale is that of a logistic whose central 99 % are as wide as those of the errors.
    """
    sizes = fit_line(data.features, data.label_bytes, terms).predict_bytes(data.features)
    smaller, larger = (
        np.flatnonzero(sizes <= np.median(sizes)),
        np.flatnonzero(sizes > np.median(sizes)),
    )
    line = fit_line(data.features[smaller], data.label_bytes[smaller], terms)
    errors = _log_errors(line, data.take(larger))
    return max(float(np.percentile(errors, 99)) / math.log(0.995 / 0.005), 1.0 / MIB)
