"""Chooses the training plan for a dataset: more options need wider networks and fewer epochs.

Reads and writes the file of a plan found by a search, for ``--plan`` of ``models train`` and
``models retrain``.

The losses in the file selected the plan on the same folds on which they were measured.  So they do
not measure how good a model is, and no code reads them.  A retraining judges the model on
architectures that are in no fold of the search.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.training_job import FAMILIES

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


FORMAT: Final = 1
KIND: Final = "gpumemnet training plan"
ABOUT: Final = (
    "The figures under 'search' selected this plan among the trials, on the folds on which they were measured. They are too "
    "optimistic and do not measure a model. 'gpumemnet retrain --plan' judges a model of this plan on architectures that the "
    "search has not seen."
)
_PLANS: Final[Mapping[str, type[Plan]]] = {"mlp": TrainingPlan, "transformer": SequencePlan}
_MOST: Final = 100_000


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """A plan from a file.

    Attributes:
        family, encoder: the classifier that it is for.
        values: values of the plan's fields, without the seed.
        sha256: hash of the file.
        name: name of the file.
    """

    family: str
    encoder: str
    values: Mapping[str, int | float]
    sha256: str
    name: str

    def plan(self, seed: int, epochs: int | None) -> Plan:
        """Return the training plan; ``epochs`` replaces the file's value if given."""
        values: dict[str, Any] = {**self.values, "seed": seed}
        plan = _PLANS[self.encoder](**values)
        return replace(plan, epochs=epochs or plan.epochs)


def document_of(family: str, encoder: str, plan: Plan, search: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a plan's file, with the report of its search."""
    values = {name: value for name, value in asdict(plan).items() if name != "seed"}
    return {
        "kind": KIND,
        "format": FORMAT,
        "family": family,
        "encoder": encoder,
        "plan": values,
        "about": ABOUT,
        "search": dict(search),
    }


def read_plan(path: Path) -> FoundPlan:
    """Read the plan in the file ``path``.

    Raises:
        InvalidRequestError: when it cannot be read, or holds no plan of this format.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}", "plan") from None
    try:
        document = json.loads(content)
        is_plan = document["kind"] == KIND and document["format"] == FORMAT
        family, encoder, values = document["family"], document["encoder"], document["plan"]
        if is_plan and family in FAMILIES and encoder in _PLANS and isinstance(values, dict):
            _check_values(values, encoder)
            return FoundPlan(
                family, encoder, values, hashlib.sha256(content).hexdigest(), path.name
            )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f" ({error})" if type(error) is ValueError else ""
        raise InvalidRequestError(f"{path} is not a training plan{reason}", "plan") from None
    raise InvalidRequestError(f"{path} is not a training plan", "plan")


def _check_values(values: Mapping[str, Any], encoder: str) -> None:
    kinds = {field.name: field.type for field in fields(_PLANS[encoder]) if field.name != "seed"}
    for name, value in values.items():
        if name not in kinds:
            raise ValueError(f"{name} is not a field of a plan")
        is_whole = type(value) is int and 1 <= value <= _MOST
        is_real = type(value) in (int, float) and math.isfinite(value) and 0.0 < value <= _MOST
        if not (is_whole if kinds[name] == "int" else is_real):
            raise ValueError(f"{name} cannot be {value}")
    if values.get("width", 16) % values.get("heads", 2):
        raise ValueError("heads must divide width")
