"""Turns request bodies into answers: reads the question, asks the predictor, and writes the JSON document.

Bytes in, bytes out, nothing of HTTP: the same functions answer a route, fill the examples in the API's description and check at
the start that every model works.  What is the same in all answers of a model is serialised once.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from gpumemnet.bins import BinScheme
from gpumemnet.bundle import Bundle
from gpumemnet.errors import BundleError, FieldError, InvalidRequestError
from gpumemnet.estimate import Estimate
from gpumemnet.job import TrainingJob
from gpumemnet.job_json import job_from_dict
from gpumemnet.predictor import Predictor
from gpumemnet.units import MIB, ceil_mib
from service.examples import EXAMPLE_JOBS
from service.limits import MAX_PROBABILITIES
from service.problems import field_problem, located
from service.questions import check_jobs, read_question

TRAINING_DATA_FIELDS: Final = ("description", "provenance", "label_source", "licence")
"""Of a card's training data, what every answer repeats; the rest is at ``GET /v1/models``."""

_LARGEST_PLAIN_INTEGER: Final = 2**63 - 1


class Answerer:
    """Answers from one predictor; holds no state that changes and may be shared by threads.

    Raises:
        BundleError: when a model does not answer the example job of its family.
    """

    def __init__(self, predictor: Predictor, max_jobs: int) -> None:
        self._predictor = predictor
        self._max_jobs = max_jobs
        self._summaries = {
            bundle.card.name: orjson.Fragment(orjson.dumps(_model_summary(bundle))) for bundle in predictor.bundles
        }
        self._families = tuple(dict.fromkeys(bundle.card.family for bundle in predictor.bundles))
        self._models = orjson.dumps({"models": [_model_details(bundle) for bundle in predictor.bundles]})
        self.check()

    @property
    def families(self) -> tuple[str, ...]:
        """The families that a model is loaded for."""
        return self._families

    @property
    def predictor(self) -> Predictor:
        """What answers."""
        return self._predictor

    @property
    def max_jobs(self) -> int:
        """Most jobs in one request."""
        return self._max_jobs

    def check(self) -> None:
        """Let every model answer the example job of its family.

        Raises:
            BundleError: when one fails.
        """
        for bundle in self._predictor.bundles:
            try:
                Predictor([bundle]).predict(job_from_dict(EXAMPLE_JOBS[bundle.card.family]))
            except Exception as error:  # whatever a foreign graph makes onnxruntime and numpy raise
                raise BundleError(f"{bundle.source}: the model does not answer ({type(error).__name__}: {error})") from error

    def predict(self, body: bytes) -> bytes:
        """The answer to ``POST /v1/predict``.

        Raises:
            InvalidRequestError, InvalidJobError, UnsupportedJobError: with the field as seen from ``body``.
        """
        document, options = read_question(body, "job")
        job = self._job(document, "job")
        return _dumps(self._answer(self._predictor.predict(job, bins=options.bins, coverage=options.coverage)))

    def predict_batch(self, body: bytes) -> bytes:
        """The answer to ``POST /v1/predict/batch``: for every job, in order, its prediction or its problem.

        Raises:
            InvalidRequestError: when the fault lies in the request and not in one of its jobs.
        """
        content, options = read_question(body, "jobs")
        documents = check_jobs(content, self._max_jobs)
        _check_size(len(documents), options.bins)
        results: list[dict[str, Any]] = [{}] * len(documents)
        jobs: dict[int, TrainingJob] = {}
        for index, document in enumerate(documents):
            try:
                jobs[index] = self._job(document, f"jobs[{index}]")
            except FieldError as error:
                results[index] = {"problem": field_problem(error)}
        estimates = self._predictor.estimate(list(jobs.values()), bins=options.bins, coverage=options.coverage)
        for index, estimate in zip(jobs, estimates, strict=True):
            results[index] = {"prediction": self._answer(estimate)}
        return _dumps({"failed": len(documents) - len(jobs), "results": results})

    def models(self) -> bytes:
        """The answer to ``GET /v1/models``."""
        return self._models

    def _job(self, document: Any, place: str) -> TrainingJob:
        try:
            job = job_from_dict(document)
            self._predictor.models_for(job)
        except FieldError as error:
            raise located(error, place) from None
        return job

    def _answer(self, estimate: Estimate) -> dict[str, Any]:
        index, bins = estimate.bin_index, estimate.bins
        lower_bytes, upper_bytes = bins.bounds_bytes(index)
        return {
            "bin": {
                "index": index,
                "lower_bytes": lower_bytes,
                "upper_bytes": upper_bytes,
                "lower_mib": lower_bytes // MIB,
                "upper_mib": None if upper_bytes is None else upper_bytes // MIB,
                "probability": float(estimate.probabilities[index]),
            },
            "expected_bytes": _integer(estimate.expected_bytes),
            "expected_mib": _integer(ceil_mib(estimate.expected_bytes)),
            "safe_bytes": estimate.safe_bytes,
            "safe_mib": None if estimate.safe_bytes is None else ceil_mib(estimate.safe_bytes),
            "coverage": estimate.coverage,
            "in_support": estimate.in_support,
            "reasons": estimate.reasons,
            "bins": {
                "name": bins.name,
                "width_bytes": bins.width_bytes,
                "width_mib": bins.width_bytes // MIB,
                "count": bins.count,
                "probabilities": estimate.probabilities,
            },
            "gpu": estimate.gpu,
            "label_source": estimate.label_source,
            "model": self._summaries[estimate.estimator],
        }


def _check_size(jobs: int, bins: BinScheme | None) -> None:
    if bins is not None and jobs * bins.count > MAX_PROBABILITIES:
        raise InvalidRequestError(
            f"gives {bins.count} bins for each of {jobs} jobs, and an answer holds at most {MAX_PROBABILITIES} probabilities: "
            "ask for wider bins or for fewer jobs at a time",
            "bins" if bins.name.startswith("published") else "bin_width_mib",
        )


def _model_summary(bundle: Bundle) -> dict[str, Any]:
    card = bundle.card
    training_data = card.document.get("training_data", {})
    return {
        "name": card.name,
        "version": card.version,
        "sha256": bundle.sha256,
        "family": card.family,
        "encoder": card.encoder,
        "training_data": {field: training_data.get(field) for field in TRAINING_DATA_FIELDS},
    }


def _model_details(bundle: Bundle) -> dict[str, Any]:
    card = bundle.card
    return {**_model_summary(bundle), "gpu": card.gpu, "coverages": card.coverages, "card": card.document}


def _integer(number: int) -> int | orjson.Fragment:
    """``number`` for orjson, which stops at 64 bits; far outside the support the closed form does not."""
    return number if number <= _LARGEST_PLAIN_INTEGER else orjson.Fragment(str(number))


def _dumps(document: dict[str, Any]) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
