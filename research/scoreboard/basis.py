"""What a kept answer rests on beside its row: the estimator's code, and for those that learn the
data and the features.

Answers of another basis are stale.  They are asked again where there is time for it; else the page
names them.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Final

import numpy as np

import gpumemnet.predict.closed_form
import gpumemnet.tracing.memory
from gpumemnet.predict.features import FEATURE_SCHEMA
from models.evaluation.closed_form import fit
from models.evaluation.closed_form import rows as line_rows
from models.networks import mlp as mlp_network
from models.networks import physics_line
from models.training import bounds, data, mlp, plans
from models.training.data import features_on
from research.estimators import dnnperf, schedtune
from research.estimators.estimator import PublishedEstimator

from . import ours
from .fitted import CLASSIFIER, DNNPERF, FAMILIES, LINE, SCHEDTUNE, TOTALS
from .sets import RowSet

_CLASSIFIER_MODULES: Final = (mlp, plans, bounds, data, mlp_network, physics_line)
_MODULES: Final[dict[str, tuple[ModuleType, ...]]] = {
    SCHEDTUNE: (schedtune,),
    LINE: (line_rows, fit, gpumemnet.predict.closed_form),
    CLASSIFIER: _CLASSIFIER_MODULES,
    TOTALS: _CLASSIFIER_MODULES,
    DNNPERF: (dnnperf,),
}
"""Estimator that learns → the modules that say how."""
_PROBED_ROWS: Final = 20
"""Features of so many rows show whether the rules of the closed form have changed."""
_DIGITS: Final = 6


@cache
def model_basis(estimator: PublishedEstimator) -> str:
    """The basis of an estimator that runs the model: its module, or its package where it has one of
    its own."""
    module = sys.modules[estimator.parts.__module__]
    path = Path(str(module.__file__))
    own_package = path.parent.parent.name == "estimators"
    return _sha256(
        [_code(each) for each in (sorted(path.parent.glob("*.py")) if own_package else [path])]
    )


@cache
def trace_basis() -> str:
    """The basis of the traces that are run again; the traces themselves are renewed with the
    datasets."""
    return _sha256(
        [_code(Path(str(module.__file__))) for module in (ours, gpumemnet.tracing.memory)]
    )


def learned_basis(name: str, rows: RowSet, datasets: Path) -> str:
    """The basis of an estimator that learns, on one set.

    Args:
        name: of the estimator.
        rows: the set, whose features are looked at.
        datasets: folder of the datasets that it learns from, for sets of real networks.
    """
    modules = [_code(Path(str(module.__file__))) for module in _MODULES[name]]
    if name == SCHEDTUNE:
        return _sha256(modules)
    return _sha256([*modules, *_training_files(rows, datasets), FEATURE_SCHEMA, _features(rows)])


def _training_files(rows: RowSet, datasets: Path) -> list[str]:
    if not rows.recipe.is_real:
        return []
    paths = [
        *sorted((datasets / "real_runs").glob("*.parquet")),
        *(datasets / f"traced_{name}_h200.parquet" for name in FAMILIES),
    ]
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]


def _features(rows: RowSet) -> str:
    chosen = [rows.rows[row] for row in rows.order[:_PROBED_ROWS]]
    values = np.concatenate([features_on(row.gpu, [row.job]) for row in chosen]).ravel().tolist()
    return json.dumps([f"{value:.{_DIGITS}g}" for value in values])


def _sha256(texts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def _code(path: Path) -> str:
    """The code of a file without comments and docstrings, which change no answer."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [
                each
                for each in body
                if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
            ]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)
