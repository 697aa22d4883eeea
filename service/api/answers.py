"""Turns request bodies into answers: reads the question, asks the predictor, and writes the JSON document.

Bytes in, bytes out, nothing of HTTP: the same functions answer a route and fill the examples in the API's description.  What is
the same in all answers of a model is serialised once.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, cast

import numpy as np
import orjson

from gpumemnet.errors import FieldError, InvalidJobError, InvalidRequestError
from gpumemnet.features.vector import FEATURE_SCHEMA
from gpumemnet.gpu.catalogue import device_profiles
from gpumemnet.gpu.fits import Fit, fits, fits_table, target
from gpumemnet.gpu.mig import available_mib, mig_profiles, reserve
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import job_from_dict, read_jobs
from gpumemnet.job.training_job import MAX_LAYERS, TrainingJob
from gpumemnet.predict.bundle import Bundle
from gpumemnet.predict.largest_batch import batch_sizes, smallest_gpu
from gpumemnet.predict.prediction import Prediction
from gpumemnet.predict.prediction_table import PredictionTable
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import MIB

from ..admin.self_test import check_golden
from ..middleware.limits import LEAST_TOGETHER, MAX_PROBABILITIES
from .prediction_id import prediction_id, prediction_ids
from .prediction_json import fit_document, integer, one_prediction
from .problems import field_problem, located
from .records import PredictionRecord, RecordBatch, Recorder
from .requests import PLAIN_OPTIONS, Options, check_jobs, read_batch_sizes, read_question, read_smallest_gpu


def _at(error: FieldError, place: str) -> FieldError:
    """The error as seen from a request whose job stands at ``place``; the encoder lies beside the job."""
    return error if error.field == "encoder" else located(error, place)


TRAINING_DATA_FIELDS: Final = ("description", "provenance", "label_source", "licence")
"""Of a card's training data, what every answer repeats; the rest is at ``GET /v1/models``."""

MAX_FITS: Final = 2**15
"""Most verdicts in one answer (jobs times targets): bounds the memory of a batch that asks what each job fits."""

SHIPPED_RELEASE: Final = "shipped"


class Answerer:
    """Answers from one predictor; holds no state that changes an answer and may be shared by threads.

    Args:
        predictor: who predicts.
        max_jobs: most jobs in one request.
        recorder: takes note of every prediction, if there is one.
        release: name of the release that the predictor's bundles belong to; every answer names it.
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
        self._endings: dict[tuple[str, str], bytes] = {}
        self._families = tuple(dict.fromkeys(family for bundle in predictor.bundles for family in bundle.card.families))
        self._models = orjson.dumps({"models": [_model_details(bundle) for bundle in predictor.bundles]})

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

    @property
    def max_layers(self) -> int:
        """Most layers of a job."""
        return self._max_layers

    @property
    def release(self) -> str:
        """Name of the release that answers."""
        return self._release

    def unrecorded(self) -> Answerer:
        """One that answers the same and of which nobody takes note: for examples and self-tests."""
        return Answerer(self._predictor, self._max_jobs, None, self._release, self._max_layers)

    def check(self) -> None:
        """Let every model answer golden jobs.

        Raises:
            BundleError: when one fails.
        """
        check_golden(self._predictor)

    def predict(self, body: bytes) -> bytes:
        """The answer to ``POST /v1/predict``.

        Raises:
            InvalidRequestError, InvalidJobError, UnsupportedJobError: with the field as seen from ``body``.
        """
        return self._predict_one(*read_question(body, "job"))

    def predict_together(self, bodies: Sequence[bytes]) -> list[bytes | FieldError]:
        """The answers to several ``POST /v1/predict``, as :meth:`predict` gives them one by one, or what it would raise."""
        answers: list[bytes | FieldError] = [b""] * len(bodies)
        plain: dict[int, Any] = {}
        single: list[tuple[int, Any, Options]] = []
        for row, body in enumerate(bodies):
            try:
                document, options = read_question(body, "job")
            except FieldError as error:
                answers[row] = error
                continue
            if options is PLAIN_OPTIONS and type(document) is dict and type(document.get("family")) is str:
                plain[row] = document
            else:
                single.append((row, document, options))
        counts = Counter(document["family"] for document in plain.values())
        single += [(row, plain.pop(row), PLAIN_OPTIONS) for row in list(plain) if counts[plain[row]["family"]] < LEAST_TOGETHER]
        for row, document, options in single:
            try:
                answers[row] = self._predict_one(document, options)
            except FieldError as error:
                answers[row] = error
        for row, answer in zip(
            plain, self._predict_documents(list(plain.values()), PLAIN_OPTIONS, lambda row: "job"), strict=True
        ):
            answers[row] = answer
        return answers

    def predict_batch(self, body: bytes) -> bytes:
        """The answer to ``POST /v1/predict/batch``: for every job, in order, its prediction or its problem.

        Raises:
            InvalidRequestError: when the fault lies in the request and not in one of its jobs.
        """
        around = (b'{"prediction":', b"}")
        content, options = read_question(body, "jobs")
        documents = check_jobs(content, self._max_jobs)
        _check_size(len(documents), options)
        results = self._predict_documents(documents, options, "jobs[{}]".format, around)
        problems = {row: result for row, result in enumerate(results) if isinstance(result, FieldError)}
        for row, problem in problems.items():
            results[row] = b'{"problem":%b}' % orjson.dumps(field_problem(problem))
        return b'{"failed":%d,"results":[%b]}' % (len(problems), b",".join(cast(list[bytes], results)))

    def _predict_one(self, document: Any, options: Options) -> bytes:
        job = self._job(document, "job", options.encoder)
        estimate = self._predictor.predict(
            job, bins=options.bins, coverage=options.coverage, gpu=options.gpu, encoder=options.encoder
        )
        if options.targets is None:
            return self._answer(job, estimate, None)
        found = fits(self._predictor, job, options.targets, coverage=options.coverage, encoder=options.encoder)
        return self._answer(job, estimate, found)

    def _predict_documents(
        self, documents: Sequence[Any], options: Options, place: Callable[[int], str], around: tuple[bytes, bytes] = (b"", b"")
    ) -> list[bytes | FieldError]:
        """For every job its answer, or what is wrong with it.

        Args:
            documents: the jobs, unread.
            options: how all of them are to be answered.
            place: where the job with a number stands in the request.
            around: what stands before and behind each answer.
        """
        results: list[bytes | FieldError] = [b""] * len(documents)
        table, rows, errors = read_jobs(documents, self._max_layers)
        refusals = self._predictor.refusals(table, options.encoder)
        errors |= {int(rows[at]): error for at, error in refusals.items()}
        for row, error in errors.items():
            results[row] = _at(error, place(row))
        if refusals:
            left = np.setdiff1d(np.arange(len(table)), list(refusals), assume_unique=True)
            table, rows = table.take(left), rows[left]
        for row, answer in zip(rows.tolist(), self._predict_many(table, options, around), strict=True):
            results[row] = answer
        return results

    def _predict_many(self, jobs: JobTable, options: Options, around: tuple[bytes, bytes]) -> list[bytes]:
        """The answers for ``jobs``."""
        predictions = self._predictor.predict_table(
            jobs, bins=options.bins, coverage=options.coverage, gpu=options.gpu, encoder=options.encoder
        )
        found: Sequence[tuple[Fit, ...] | None] = [None] * len(jobs)
        if options.targets is not None:
            found = fits_table(self._predictor, jobs, options.targets, coverage=options.coverage, encoder=options.encoder)
        before, behind = around
        return [
            before + one_prediction(identity, prediction, verdicts, self._ending(prediction) + behind)
            for identity, prediction, verdicts in zip(self._noted_many(jobs, predictions), predictions, found, strict=True)
        ]

    def batch_sizes(self, body: bytes) -> bytes:
        """The answer to ``POST /v1/batch-sizes``: the largest batches that fit a GPU, and memory against batch size.

        Raises:
            InvalidRequestError, InvalidJobError, UnsupportedJobError: with the field as seen from ``body``.
        """
        asked = read_batch_sizes(body)
        job = self._job(asked.job, "job", asked.encoder)
        gpu = asked.gpu or self._predictor.predict(job, coverage=asked.coverage, encoder=asked.encoder).gpu
        found = batch_sizes(
            self._predictor,
            job,
            target(gpu, mig=asked.mig, free_mib=asked.free_mib),
            coverage=asked.coverage,
            encoder=asked.encoder,
            max_batch=asked.max_batch,
        )
        curve = [
            {"batch_size": point.batch_size, "request_mib": integer(point.request_mib), "limit_mib": point.limit_mib}
            for point in found.curve
        ]
        return orjson.dumps(
            {
                "gpu": found.gpu,
                "mig": found.mig,
                "available_mib": found.available_mib,
                "coverage": found.coverage,
                "max_batch": found.max_batch,
                "safe_batch": found.safe_batch,
                "likely_batch": found.likely_batch,
                "reasons": found.reasons,
                "curve": curve,
                "release": self._release,
                "feature_schema": FEATURE_SCHEMA,
            }
        )

    def smallest_gpu(self, body: bytes) -> bytes:
        """The answer to ``POST /v1/smallest-gpu``: the smallest GPU or MIG profile that holds a job.

        Raises:
            InvalidRequestError, InvalidJobError, UnsupportedJobError: with the field as seen from ``body``.
        """
        document, options = read_smallest_gpu(body)
        job = self._job(document, "job", options.encoder)
        found = smallest_gpu(self._predictor, job, options.targets, coverage=options.coverage, encoder=options.encoder)
        return orjson.dumps(
            {
                "coverage": found.coverage,
                "safe": None if found.safe is None else fit_document(found.safe),
                "likely": None if found.likely is None else fit_document(found.likely),
                "reasons": found.reasons,
                "release": self._release,
                "feature_schema": FEATURE_SCHEMA,
            }
        )

    def noted(self, job: TrainingJob, estimate: Prediction) -> str:
        """A new prediction's id, under which the recorder, if there is one, has taken note of it."""
        now_nanoseconds = time.time_ns()
        identity = prediction_id(now_nanoseconds)
        if self._recorder is not None:
            sha256 = self._bundles[estimate.estimator].sha256
            self._recorder.record(PredictionRecord(identity, now_nanoseconds / 1e9, job, estimate, sha256, self._release))
        return identity

    def _noted_many(self, jobs: JobTable, predictions: PredictionTable) -> list[str]:
        """The ids of new predictions; the recorder takes note of them as :meth:`noted` has it."""
        now_nanoseconds = time.time_ns()
        identities = prediction_ids(now_nanoseconds, len(jobs))
        if self._recorder is not None and len(jobs):
            hashes = [self._bundles[model.name].sha256 for model in predictions.models]
            sha256s = list(map(hashes.__getitem__, predictions.model_index.tolist()))
            records = RecordBatch(identities, now_nanoseconds / 1e9, jobs, predictions, sha256s, self._release)
            self._recorder.record_many(records)
        return identities

    def models(self) -> bytes:
        """The answer to ``GET /v1/models``."""
        return self._models

    def gpus(self) -> bytes:
        """The answer to ``GET /v1/gpus``."""
        return _gpus()

    def _job(self, document: Any, place: str, encoder: str | None) -> TrainingJob:
        try:
            if type(document) is dict and type(layers := document.get("layers")) is list and len(layers) > self._max_layers:
                raise InvalidJobError(f"must hold at most {self._max_layers} layers, not {len(layers)}", "layers")
            job = job_from_dict(document)
            self._predictor.models_for(job, encoder)
        except FieldError as error:
            raise _at(error, place) from None
        return job

    def _answer(self, job: TrainingJob, estimate: Prediction, found: tuple[Fit, ...] | None) -> bytes:
        """One prediction as JSON; what is the same in all answers of a model is taken from where it was put the first time."""
        return one_prediction(self.noted(job, estimate), estimate, found, self._ending(estimate))

    def _ending(self, estimate: Prediction) -> bytes:
        """The last members of an answer, and its closing brace."""
        key = estimate.estimator, estimate.gpu
        ending = self._endings.get(key)
        if ending is None:
            members = {
                "gpu": estimate.gpu,
                "label_source": estimate.label_source,
                "release": self._release,
                "feature_schema": FEATURE_SCHEMA,
                "model": _model_summary(self._bundles[estimate.estimator]),
            }
            ending = self._endings[key] = b"," + orjson.dumps(members)[1:]
        return ending


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
def _gpus() -> bytes:
    return orjson.dumps(
        {
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
