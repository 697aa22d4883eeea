"""The search space: the fields of a training plan and their possible values.

A trial of Optuna is passed in, so this module does not import Optuna.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from ..training.plans import Plan


@dataclass(frozen=True, slots=True)
class NumberRange:
    """A number from ``low`` to ``high``: an integer in steps of ``step``, or without ``step`` a
    float on a log scale."""

    low: float
    high: float
    step: int | None = None


Choices = tuple[int, ...]

SPACES: Final[Mapping[str, Mapping[str, NumberRange | Choices]]] = {
    "mlp": {
        "hidden": (32, 48, 64, 96, 128),
        "components": (2, 3, 4, 5),
        "epochs": NumberRange(20, 120, 10),
        "batch_rows": (64, 128, 256),
        "learning_rate": NumberRange(1e-3, 1e-2),
        "weight_decay": NumberRange(0.01, 1.0),
    },
    "transformer": {
        "width": (8, 16, 24, 32),
        "depth": (1, 2, 3),
        "heads": (1, 2, 4),
        "hidden": (48, 64, 96, 128),
        "components": (2, 3, 4, 5),
        "epochs": NumberRange(10, 40, 5),
        "batch_rows": (32, 64, 128),
        "learning_rate": NumberRange(1e-3, 1e-2),
        "weight_decay": NumberRange(0.01, 1.0),
    },
}
"""The number of members is not searched: more members are always slightly better, but make
predictions slower."""


def values_of(plan: Plan, encoder: str, epochs: int | None) -> dict[str, Any]:
    """Return the values of ``plan`` in the searched fields; these exclude the epochs if ``epochs``
    is given."""
    values = asdict(plan)
    return {name: values[name] for name in SPACES[encoder] if name != "epochs" or epochs is None}


def suggested(trial: Any, encoder: str, epochs: int | None) -> dict[str, Any]:
    """Return the values that an Optuna trial suggests."""
    values: dict[str, Any] = {}
    for name, allowed in SPACES[encoder].items():
        if name == "epochs" and epochs is not None:
            continue
        if isinstance(allowed, tuple):
            values[name] = trial.suggest_categorical(name, allowed)
        elif allowed.step is not None:
            values[name] = trial.suggest_int(
                name, int(allowed.low), int(allowed.high), step=allowed.step
            )
        else:
            values[name] = trial.suggest_float(name, allowed.low, allowed.high, log=True)
    return values
