"""Predicts: reads the jobs into a table, calls the predictor once, and writes the JSON documents of the response.

It knows nothing of HTTP.  The same functions serve the endpoints and fill the examples of the OpenAPI description.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from gpumemnet.errors import FieldError, InvalidRequestError
from gpumemnet.features.vector import FEATURE_SCHEMA
from gpumemnet.gpu.catalogue import device_profiles
from gpumemnet.gpu.mig import available_mib, mig_profiles, reserve
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import ReadJobs, read_jobs
from gpumemnet.job.training_job import MAX_LAYERS, TrainingJob
from gpumemnet.predict.answer import answer_document
from gpumemnet.predict.bundle import Bundle
from gpumemnet.predict.fits import Fit, fits_table, target
from gpumemnet.predict.largest_batch import DEFAULT_MAX_BATCH, batch_sizes, smallest_gpu
from gpumemnet.predict.prediction import DEFAULT_COVERAGE
from gpumemnet.predict.prediction_table import PredictionTable
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import MIB

from ..admin.self_test import check_golden
from ..middleware.limits import MAX_PROBABILITIES
from .models import BatchRequest, BatchSizesRequest, PredictRequest, SmallestGpuRequest
from .prediction_id import prediction_id
from .problems import field_problem, located
from .records import RecordBatch, Recorder
from .requests import Options, options_of, read_request, smallest_gpu_options

TRAINING_DATA_FIELDS: Final = ("description", "provenance", "label_source", "licence")
"""The members of a card's training data that every prediction repeats; ``GET /v1/models`` has the rest."""

MAX_FITS: Final = 2**15
"""Most fit verdicts in one response (jobs times targets): bounds the memory of a batch with ``fits``."""

SHIPPED_RELEASE: Final = "shipped"

Document = dict[str, Any]


class Question(NamedTuple):
    """A job that is not parsed yet, and the options of its prediction."""

    job: Any
    options: Options


class Answerer:
    """Predicts with one predictor; threads may share it, because it keeps no state that changes a prediction.

    Args:
        predictor: makes the predictions.
        max_jobs: most jobs in one request.
        recorder: receives every prediction; ``None`` records nothing.
        release: name of the release that the predictor's bundles belong to; every prediction names it.
        max_layers: most layers of a job.
    """

    def __init__(
        self,
        predictor: Predictor,
        max_jobs: int,
        recorder: Recorder | None = None,
        release: str = SHIPPED_RELEASE,
        max_layers: int = MAX_LAYERS,
    ) -> None:
        self._predictor = predictor
        self._max_jobs = max_jobs
        self._recorder = recorder
        self._release = release
        self._max_layers = max_layers
        self._bundles = {bundle.card.name: bundle for bundle in predictor.bundles}
        self._summaries = {name: _model_summary(bundle) for name, bundle in self._bundles.items()}
        self._origin = {"release": release, "feature_schema": FEATURE_SCHEMA}
        self._families = tuple(dict.fromkeys(family for bundle in predictor.bundles for family in bundle.card.families))

    @property
    def families(self) -> tuple[str, ...]:
        """The families with a loaded model."""
        return self._families

    @property
    def predictor(self) -> Predictor:
        """The predictor in use."""
        return self._predictor

    @property
    def max_jobs(self) -> int:
        """Most jobs in one request."""
        return self._max_jobs

    @property
    def max_layers(self) -> int:
        """Most layers of a job."""
        return self._max_layers

    @property
    def release(self) -> str:
        """Name of the served release."""
        return self._release

    def unrecorded(self) -> Answerer:
        """A copy that makes the same predictions but records none: for examples and self-tests."""
        return Answerer(self._predictor, self._max_jobs, None, self._release, self._max_layers)

    def check(self) -> None:
        """Let every model predict golden jobs.

        Raises:
            BundleError: when one fails.
        """
        check_golden(self._predictor)

    def predict(self, body: bytes) -> Document:
        """The response to ``POST /v1/predict``.

        Raises:
            InvalidRequestError, InvalidJobError, UnsupportedJobError: with the field's path from ``body``.
        """
        answer = self.answers([read_question(body)])[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def answers(self, questions: Sequence[Question]) -> list[Document | FieldError]:
        """The prediction or the error of each question; questions with equal options are predicted as one table."""
        answers: list[Document | FieldError] = [{} for _ in questions]
        rows_of: dict[Options, list[int]] = {}
        for row, question in enumerate(questions):
            rows_of.setdefault(question.options, []).append(row)
        for options, rows in rows_of.items():
            jobs = self.read([questions[row].job for row in rows], options.encoder, lambda row: "job")
            try:
                documents: Sequence[Document | FieldError] = self._documents(jobs.table, options)
            except FieldError as error:  # an invalid option
                documents = [error] * len(jobs.table)
            for row, answer in zip(rows, _in_order(jobs, documents), strict=True):
                answers[row] = answer
        return answers

    def predict_batch(self, body: bytes) -> Document:
        """The response to ``POST /v1/predict/batch``: for every job, in order, its prediction or its problem.

        Raises:
            InvalidRequestError: when the request itself is invalid, and not just one of its jobs.
        """
        request = read_request(body, BatchRequest)
        if len(request.jobs) > self._max_jobs:
            raise InvalidRequestError(
                f"must hold at most {self._max_jobs} jobs, not {len(request.jobs)}: send them in several requests", "jobs"
            )
        options = options_of(request)
        _check_size(len(request.jobs), options)
        jobs = self.read(request.jobs, options.encoder, "jobs[{}]".format)
        answers = _in_order(jobs, self._documents(jobs.table, options))
        results = [{"problem": field_problem(one)} if isinstance(one, FieldError) else {"prediction": one} for one in answers]
        return {"failed": len(jobs.errors), "results": results}

    def read(self, documents: Sequence[Any], encoder: str | None, place: Callable[[int], str]) -> ReadJobs:
        """The valid jobs, and the errors of the others, with the field's path from the request.

        Args:
            documents: the JSON documents of the jobs.
            encoder: the classifier to use; ``None`` for the predictor's choice.
            place: maps a job's index to its path in the request.
        """
        table, rows, invalid = read_jobs(documents, self._max_layers)
        refusals = self._predictor.refusals(table, encoder)
        if not invalid and not refusals:
            return ReadJobs(table, rows, {})
        errors = invalid | {int(rows[at]): error for at, error in refusals.items()}
        if refusals:
            left = np.setdiff1d(np.arange(len(table)), list(refusals), assume_unique=True)
            table, rows = table.take(left), rows[left]
        # `encoder` is a member of the request, not of a job: its path stays.
        placed = {row: error if error.field == "encoder" else located(error, place(row)) for row, error in errors.items()}
        return ReadJobs(table, rows, placed)

    def _documents(self, jobs: JobTable, options: Options) -> list[Document]:
        """The JSON documents of the predictions for ``jobs``."""
        if not len(jobs):
            return []
        predictions = self._predictor.predict_table(jobs, options)
        identities = self.noted(jobs, predictions)
        documents = []
        for identity, prediction in zip(identities, predictions, strict=True):
            document = {"prediction_id": identity, **answer_document(prediction), **self._origin}
            document["model"] = self._summaries[prediction.estimator]
            documents.append(document)
        if options.targets is not None:
            found = fits_table(self._predictor, jobs, options.targets, coverage=options.coverage, encoder=options.encoder)
            for document, fits in zip(documents, found, strict=True):
                document["fits"] = [fit_document(fit) for fit in fits]
        return documents

    def batch_sizes(self, body: bytes) -> Document:
        """The response to ``POST /v1/batch-sizes``: the largest batches that fit a GPU, and memory against batch size.

        Raises:
            InvalidRequestError, InvalidJobError, UnsupportedJobError: with the field's path from ``body``.
        """
        asked = read_request(body, BatchSizesRequest)
        if asked.gpu is None and asked.mig is not None:
            raise InvalidRequestError("is a part of a GPU: name that as 'gpu'", "mig")
        coverage = DEFAULT_COVERAGE if asked.coverage is None else asked.coverage
        job = self._job(asked.job, asked.encoder)
        gpu = asked.gpu or self._predictor.predict(job, coverage=coverage, encoder=asked.encoder).gpu
        found = batch_sizes(
            self._predictor,
            job,
            target(gpu, mig=asked.mig, free_mib=asked.free_mib),
            coverage=coverage,
            encoder=asked.encoder,
            max_batch=asked.max_batch or DEFAULT_MAX_BATCH,
        )
        curve = [
            {"batch_size": point.batch_size, "request_mib": point.request_mib, "limit_mib": point.limit_mib}
            for point in found.curve
        ]
        return {
            "gpu": found.gpu,
            "mig": found.mig,
            "available_mib": found.available_mib,
            "coverage": found.coverage,
            "max_batch": found.max_batch,
            "safe_batch": found.safe_batch,
            "likely_batch": found.likely_batch,
            "reasons": list(found.reasons),
            "curve": curve,
            **self._origin,
        }

    def smallest_gpu(self, body: bytes) -> Document:
        """The response to ``POST /v1/smallest-gpu``: the smallest GPU or MIG profile that holds a job.

        Raises:
            InvalidRequestError, InvalidJobError, UnsupportedJobError: with the field's path from ``body``.
        """
        asked = read_request(body, SmallestGpuRequest)
        options = smallest_gpu_options(asked)
        job = self._job(asked.job, options.encoder)
        found = smallest_gpu(self._predictor, job, options.targets, coverage=options.coverage, encoder=options.encoder)
        return {
            "coverage": found.coverage,
            "safe": None if found.safe is None else fit_document(found.safe),
            "likely": None if found.likely is None else fit_document(found.likely),
            "reasons": list(found.reasons),
            **self._origin,
        }

    def noted(self, jobs: JobTable, predictions: PredictionTable) -> list[str]:
        """Record new predictions if there is a recorder; returns their ids."""
        now_nanoseconds = time.time_ns()
        identities = [prediction_id(now_nanoseconds) for _ in range(len(jobs))]
        if self._recorder is not None:
            sha256 = [self._bundles[model.name].sha256 for model in predictions.models]
            sha256s = [sha256[model] for model in predictions.model_index.tolist()]
            self._recorder.record(RecordBatch(identities, now_nanoseconds / 1e9, jobs, predictions, sha256s, self._release))
        return identities

    def models(self) -> list[Document]:
        """The loaded models, as ``GET /v1/models`` lists them."""
        return [_model_details(bundle) for bundle in self._predictor.bundles]

    def _job(self, document: Any, encoder: str | None) -> TrainingJob:
        read = self.read([document], encoder, lambda row: "job")
        for error in read.errors.values():
            raise error
        return read.table[0]


def _in_order(jobs: ReadJobs, documents: Sequence[Document | FieldError]) -> list[Document | FieldError]:
    """The results and errors, by position in the request."""
    answers = jobs.errors | dict(zip(jobs.rows.tolist(), documents, strict=True))
    return [answers[row] for row in range(len(answers))]


def read_question(body: bytes) -> Question:
    """The question in a body of ``POST /v1/predict``.

    Raises:
        InvalidRequestError: when the body is not JSON, or a member beside the job is invalid.
    """
    request = read_request(body, PredictRequest)
    return Question(request.job, options_of(request))


def fit_document(fit: Fit) -> Document:
    """The JSON document of one fit verdict."""
    return {
        "gpu": fit.gpu,
        "mig": fit.mig,
        "device": fit.device,
        "available_mib": fit.available_mib,
        "request_mib": fit.request_mib,
        "limit_mib": fit.limit_mib,
        "verdict": fit.verdict,
        "probability": fit.probability,
    }


def _check_size(jobs: int, options: Options) -> None:
    bins = options.bins
    if bins is not None and jobs * bins.count > MAX_PROBABILITIES:
        raise InvalidRequestError(
            f"gives {bins.count} bins for each of {jobs} jobs, and an answer holds at most {MAX_PROBABILITIES} probabilities: "
            "ask for wider bins or for fewer jobs at a time",
            "bins" if bins.name.startswith("published") else "bin_width_mib",
        )
    targets = options.targets or ()
    if jobs * len(targets) > MAX_FITS:
        raise InvalidRequestError(
            f"gives {len(targets)} verdicts for each of {jobs} jobs, and an answer holds at most {MAX_FITS}: "
            "name fewer GPUs or send fewer jobs at a time",
            "fits",
        )


@cache
def gpus_document() -> Document:
    """The response to ``GET /v1/gpus``."""
    return {
        "gpus": [
            {
                "name": profile.name,
                "aliases": profile.aliases,
                "capacity_mib": profile.capacity_bytes // MIB,
                "reserved_mib": reserve(profile.name).reserved_mib,
                "reserved_source": reserve(profile.name).source,
                "available_mib": available_mib(profile),
                "mig": [
                    {
                        "name": mig.name,
                        "memory_mib": mig.memory_mib,
                        "available_mib": available_mib(profile, mig),
                        "source": mig.source,
                    }
                    for mig in mig_profiles(profile.name)
                ],
            }
            for profile in device_profiles()
        ]
    }


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
