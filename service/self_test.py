"""The self-test that a release must pass before it serves: it predicts golden jobs, and every
prediction must meet fixed rules.

A graph may load and run, and still be useless: trained on other units, exported with swapped
columns, or trained too briefly. The rules hold for every usable model.  Whether one model is better
than another is measured in shadow mode.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

import numpy as np

from gpumemnet.errors import BundleError
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.features import FEATURE_NAMES
from gpumemnet.predict.model import BundleModel
from gpumemnet.predict.predictor import Predictor

from .api.examples import EXAMPLE_JOBS, as_totals

PLAUSIBLE_FACTOR: Final = 4.0
"""Greatest factor, up or down, between a predicted peak and the job's computed memory.
The computed memory is the sum of context, weights, gradients, optimizer state and layer outputs.
The shipped models lie between 0.8 and 1.7 times it.
"""

_SUM_TOLERANCE: Final = 1e-6
_PHYSICAL_COLUMNS: Final = [
    FEATURE_NAMES.index(name)
    for name in (
        "weight_bytes",
        "gradient_bytes",
        "optimizer_state_bytes",
        "input_bytes",
        "activation_bytes",
    )
]


def check_golden(predictor: Predictor, tested: Container[str] = ()) -> None:
    """Let every model of ``predictor`` predict golden jobs.

    Args:
        predictor: to test.
        tested: hashes of bundles that have passed the test in this process, and are not tested
            again.

    Raises:
        BundleError: names the bundle, the job and the fault.
    """
    for bundle in predictor.bundles:
        for family in bundle.card.families:
            for model in predictor.models_of(family, bundle.card.encoder):
                if model.bundle.sha256 not in tested:
                    _check(model, family)


def _check(model: BundleModel, family: str) -> None:
    described = {"layers": EXAMPLE_JOBS[family]}
    if not model.needs_layers:
        described["totals"] = as_totals(EXAMPLE_JOBS[family])
    for name, document in described.items():
        try:
            problem = _problem(model, job_from_dict(document))
        except Exception as error:  # onnxruntime and numpy may raise any exception
            problem = f"is not answered ({type(error).__name__}: {error})"
        if problem:
            raise BundleError(
                f"the self-test of {model.card.name} (bundle {model.bundle.sha256[:12]}) failed: "
                f"the {family} job with {name} {problem}"
            )


def _problem(model: BundleModel, job: TrainingJob) -> str | None:
    table = JobTable.from_jobs((job,))
    features = model.features(table, model.label_gpu)
    answer = model.run(table, features)
    amounts = (answer.expected_bytes, answer.bounds_bytes)
    if answer.is_broken is not None or not all(np.isfinite(part).all() for part in amounts):
        return "gets numbers that are not finite"
    estimates = [model.predict(table, None, each)[0] for each in model.card.coverages]
    limits = [estimate.safe_bytes for estimate in estimates if estimate.safe_bytes is not None]
    if limits != sorted(limits):
        return "gets safe bytes that do not rise with the coverage"
    for estimate in estimates:
        total = float(estimate.probabilities.sum())
        if not (estimate.probabilities.min() >= 0 and abs(total - 1) <= _SUM_TOLERANCE):
            return f"gets probabilities that add up to {total:.6g}"
        if estimate.safe_bytes is not None and estimate.safe_bytes < estimate.expected_bytes:
            return f"gets {estimate.safe_bytes:,} safe bytes, below the {estimate.expected_bytes:,} expected"
        computed_bytes = float(model.card.context_bytes + features[0, _PHYSICAL_COLUMNS].sum())
        ratio = estimate.expected_bytes / computed_bytes
        if not 1 / PLAUSIBLE_FACTOR <= ratio <= PLAUSIBLE_FACTOR:
            return (
                f"gets {estimate.expected_bytes:,} expected bytes, {ratio:.3g} times of what context and "
                "tensors take"
            )
    return None
