"""The self-test that a release must pass before it serves: it predicts golden jobs, and every
prediction must meet fixed rules.

A graph may load and run, and still be useless: trained on other units, exported with swapped
columns, or trained too briefly. The rules hold for every usable model.  Whether one model is better
than another is measured in shadow mode.

A model card may add golden predictions (``"golden": [{"job": …, "expected_bytes": …, "safe_bytes":
…}]``), which are tested as well.  They contain the context of the labels, and show that this
machine computes the same values as the training machine.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from typing import Any, Final

import numpy as np

from gpumemnet.errors import BundleError
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.bundle_card import ENCODERS
from gpumemnet.predict.features import FEATURE_NAMES
from gpumemnet.predict.model import BundleModel
from gpumemnet.predict.prediction import Prediction
from gpumemnet.predict.predictor import Predictor

from .api.examples import predict_examples

PLAUSIBLE_FACTOR: Final = 4.0
"""Greatest factor, up or down, between a predicted peak and the job's computed memory.
The computed memory is the sum of context, weights, gradients, optimizer state and layer outputs.
The shipped models lie between 0.8 and 1.7 times it.
"""

GOLDEN_TOLERANCE: Final = 0.01
"""Relative tolerance; single precision differs far less between processors."""

_SUM_TOLERANCE: Final = 1e-6
_BATCH_TOLERANCE: Final = 1e-4
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
    for model in _models(predictor):
        if model.bundle.sha256 in tested:
            continue
        golden = [
            (name, job)
            for name, job in _golden_jobs(model.card.family)
            if job.has_layers or not model.needs_layers
        ]
        for name, job in golden:
            _checked(model, name, job)
        _check_together(model, [job for _, job in golden])
        for number, entry in enumerate(_own_golden(model)):
            _check_own(model, number, entry)


def _models(predictor: Predictor) -> Iterator[BundleModel]:
    families = dict.fromkeys(
        family for bundle in predictor.bundles for family in bundle.card.families
    )
    loaded = {
        (family, bundle.card.encoder)
        for bundle in predictor.bundles
        for family in bundle.card.families
    }
    for family in families:
        for encoder in ENCODERS:
            if (family, encoder) in loaded:
                yield from predictor.models_of(family, encoder)


def _golden_jobs(family: str) -> Iterator[tuple[str, TrainingJob]]:
    for name, question in predict_examples(family).items():
        job = job_from_dict(question["job"])
        yield f"{family} job with {name}", job


def _checked(model: BundleModel, name: str, job: TrainingJob) -> None:
    try:
        problem = _problem(model, job)
    except Exception as error:  # onnxruntime and numpy may raise any exception on an unknown graph
        raise _failure(
            model, f"the {name} is not answered ({type(error).__name__}: {error})"
        ) from error
    if problem:
        raise _failure(model, f"the {name}: {problem}")


def _problem(model: BundleModel, job: TrainingJob) -> str | None:
    table = JobTable.from_jobs((job,))
    features = model.features(table, model.label_gpu)
    answer = model.run(table, features)
    mixture = answer.distribution
    amounts = (answer.reference_bytes, answer.expected_bytes, answer.bounds_bytes)
    if answer.is_broken is not None or not all(
        np.isfinite(part).all()
        for part in (mixture.weights, mixture.locations, mixture.scales, *amounts)
    ):
        return "the graph's outputs are not finite"
    unseen = model.support.check(table, features)
    estimates = [
        model.predict(table, None, coverage, None, features, unseen)[0]
        for coverage in model.card.coverages
    ]
    for estimate in estimates:
        problem = _estimate_problem(estimate)
        if problem:
            return problem
    limits = [estimate.safe_bytes for estimate in estimates if estimate.safe_bytes is not None]
    if limits != sorted(limits):
        return "the safe bytes do not rise with the coverage"
    if not _same(estimates[-1], model.predict(table, None, model.card.coverages[-1])[0], 0.0):
        return "asked twice it answers differently"
    closed_form = float(model.card.context_bytes + features[0, _PHYSICAL_COLUMNS].sum())
    ratio = estimates[-1].expected_bytes / closed_form
    if not 1 / PLAUSIBLE_FACTOR <= ratio <= PLAUSIBLE_FACTOR:
        return f"expected are {estimates[-1].expected_bytes:,} bytes, {ratio:.3g} times of what context and tensors take"
    return None


def _estimate_problem(estimate: Prediction) -> str | None:
    probabilities = estimate.probabilities
    if not np.isfinite(probabilities).all() or (probabilities < 0).any():
        return "a probability is no number from 0 to 1"
    if abs(float(probabilities.sum()) - 1.0) > _SUM_TOLERANCE:
        return f"the probabilities add up to {float(probabilities.sum()):.6g}"
    if estimate.expected_bytes <= 0:
        return f"expected are {estimate.expected_bytes} bytes"
    if estimate.safe_bytes is not None and estimate.safe_bytes < estimate.expected_bytes:
        return f"the safe bytes ({estimate.safe_bytes:,}) lie below the expected bytes ({estimate.expected_bytes:,})"
    return None


def _check_together(model: BundleModel, jobs: list[TrainingJob]) -> None:
    """Check that a job's prediction does not depend on the other jobs of the batch."""
    coverage = model.card.coverages[0]
    together = model.predict(JobTable.from_jobs(jobs), None, coverage)
    for job, estimate in zip(jobs, together, strict=True):
        alone = model.predict(JobTable.from_jobs((job,)), None, coverage)[0]
        if not _same(estimate, alone, _BATCH_TOLERANCE):
            raise _failure(model, "a job gets another answer when it is asked together with others")


def _same(one: Prediction, other: Prediction, tolerance: float) -> bool:
    if (one.safe_bytes is None) != (other.safe_bytes is None):
        return False
    return (
        math.isclose(one.expected_bytes, other.expected_bytes, rel_tol=tolerance)
        and math.isclose(one.safe_bytes or 0, other.safe_bytes or 0, rel_tol=tolerance)
        and bool(np.allclose(one.probabilities, other.probabilities, rtol=0, atol=tolerance))
    )


def _own_golden(model: BundleModel) -> list[Any]:
    golden = model.card.document.get("golden", [])
    if not isinstance(golden, list):
        raise _failure(model, "the card's golden answers are no list")
    return golden


def _check_own(model: BundleModel, number: int, entry: Any) -> None:
    try:
        job, answers = (
            job_from_dict(entry["job"]),
            {name: entry[name] for name in ("expected_bytes", "safe_bytes")},
        )
        if job.family != model.card.family and job.family in model.bundle.card.families:
            return  # the model is tested through its other family
        estimate = model.predict(
            JobTable.from_jobs((job,)), None, entry.get("coverage", model.card.coverages[-1])
        )[0]
        found: Mapping[str, int | None] = {
            "expected_bytes": estimate.expected_bytes,
            "safe_bytes": estimate.safe_bytes,
        }
        for name, expected in answers.items():
            bytes_found = found[name]
            is_same = (
                expected is bytes_found
                if expected is None or bytes_found is None
                else math.isclose(expected, bytes_found, rel_tol=GOLDEN_TOLERANCE)
            )
            if not is_same:
                raise _failure(
                    model,
                    f"golden job {number} of its card: {name} are {bytes_found} and should be {expected}",
                )
    except BundleError:
        raise
    except Exception as error:
        raise _failure(
            model,
            f"golden job {number} of its card is not answered ({type(error).__name__}: {error})",
        ) from error


def _failure(model: BundleModel, what: str) -> BundleError:
    return BundleError(
        f"the self-test of {model.card.name} (bundle {model.bundle.sha256[:12]}) failed: {what}"
    )
