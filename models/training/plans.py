"""Chooses the training plan for a dataset: more options need wider networks and fewer epochs."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from .data import LabelledJobs
from .mlp import TrainingPlan
from .sequence import SequencePlan

Plan = TrainingPlan | SequencePlan

MANY_OPTIONS: Final = TrainingPlan(hidden=96, epochs=12)
"""For jobs of many optimizers and precisions."""
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


def transformer_plan(seed: int, epochs: int | None = None) -> SequencePlan:
    """Return the plan of the transformer-based classifier."""
    plan = SequencePlan(seed=seed)
    return replace(plan, epochs=epochs or plan.epochs)
