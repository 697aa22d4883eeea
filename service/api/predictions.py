"""Predicts: reads the jobs into a table, calls the predictor once, and writes the JSON documents of
the response.

It knows nothing of HTTP.  Every prediction gets an id, is counted, and goes to a :class:`Recorder`,
which may store it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Final, NamedTuple, Protocol

from gpumemnet.atomic_files import Document
from gpumemnet.errors import FieldError, InvalidRequestError
from gpumemnet.gpu import available_mib, device_profiles, mig_profiles, reserve
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import ReadJobs, read_jobs
from gpumemnet.job.table_reader import error_at
from gpumemnet.predict.bundle import Bundle
from gpumemnet.predict.distribution import bins_of_width
from gpumemnet.predict.features import FEATURE_SCHEMA
from gpumemnet.predict.gpu_fit import Target, catalogue_targets, fits_table, target
from gpumemnet.predict.largest_batch import (
    DEFAULT_MAX_BATCH,
    batch_sizes,
)
from gpumemnet.predict.prediction import DEFAULT_COVERAGE, PredictionOptions, PredictionTable
from gpumemnet.predict.predictor import Predictor
from gpumemnet.site.releases import SHIPPED
from gpumemnet.units import MIB

from .handlers import read_request
from .monitoring import PREDICTIONS, labelled
from .problems import problem_document
from .schemas import (
    MAX_JOBS,
    BatchRequest,
    BatchSizesRequest,
    Device,
    PredictOptions,
    PredictRequest,
)

MAX_FITS: Final = 2**15
"""Most fit verdicts in one response (jobs times targets): bounds the memory of a batch with
``fits``."""
MAX_PROBABILITIES: Final = 2**18
"""Most probabilities in one response (jobs times bins): bounds the memory of a batch with narrow
bins."""


@dataclass(frozen=True, eq=False)
class RecordBatch:
    """Predictions made at once.

    Attributes:
        prediction_ids: of each prediction.
        made_at_seconds: creation time of all, in seconds since the epoch.
        jobs: the jobs; at least one.
        estimates: the predictions.
        model_sha256: hash of the bundle that made them.
        release: name of the release that the bundles belong to.
    """

    prediction_ids: Sequence[str]
    made_at_seconds: float
    jobs: JobTable
    estimates: PredictionTable
    model_sha256: str
    release: str

    def __len__(self) -> int:
        return len(self.prediction_ids)


class Recorder(Protocol):
    """Receives predictions."""

    def record(self, records: RecordBatch) -> None:
        """Record predictions; never blocks, never raises, and may drop some under load."""
        ...


@dataclass(frozen=True, kw_only=True)
class Options(PredictionOptions):
    """The options of a request; requests with equal options are predicted together.

    Attributes:
        targets: the GPUs, MIG profiles or devices of ``fits``; ``None`` without ``fits``.
    """

    targets: tuple[Target, ...] | None = None


def options_of(request: PredictOptions) -> Options:
    """The options of ``request``.

    Raises:
        InvalidRequestError: for an unknown GPU.
    """
    width_mib = request.bin_width_mib
    coverage = DEFAULT_COVERAGE if request.coverage is None else request.coverage
    return Options(
        coverage=coverage,
        bins=None if width_mib is None else bins_of_width(width_mib * MIB),
        gpu=request.gpu,
        encoder=request.encoder,
        targets=_targets(request.fits, request.devices),
    )


def _targets(
    names: bool | Sequence[str] | None, devices: Sequence[Device] | None
) -> tuple[Target, ...] | None:
    """The GPUs, MIG profiles and devices that a request names; ``None`` where it names none."""
    if names in (None, False) and devices is None:
        return None
    targets = list(catalogue_targets()) if names is True else []
    path = ""
    try:
        for index, name in enumerate(() if isinstance(names, bool) else names or ()):
            path = f"fits[{index}]"
            targets.append(target(name))
        for index, each in enumerate(devices or ()):
            path = f"devices[{index}].{{}}"
            targets.append(target(each.gpu, free_mib=each.free_mib, device=each.id))
    except InvalidRequestError as error:
        raise InvalidRequestError(error.reason, path.format(error.field)) from None
    return tuple(targets)


class JobRequest(NamedTuple):
    """The request of one prediction: the JSON document of the job, not read yet, and the
    options."""

    job: Any
    options: Options


def read_job_request(body: bytes) -> JobRequest:
    """The request in a body of ``POST /v1/predict``.

    Raises:
        InvalidRequestError: when the body is not JSON, or a member beside the job is invalid.
    """
    request = read_request(body, PredictRequest)
    return JobRequest(request.job, options_of(request))


class PredictionApi:
    """Predicts with one predictor; threads may share it, because it keeps no state that changes a
    prediction.

    Args:
        predictor: makes the predictions.
        recorder: receives every prediction; ``None`` records nothing.
        release: name of the release that the predictor's bundles belong to; every prediction names
            it.

    Attributes:
        families: the families with a loaded model.
    """

    def __init__(
        self,
        predictor: Predictor,
        recorder: Recorder | None = None,
        release: str = SHIPPED,
    ) -> None:
        self.predictor = predictor
        self._recorder = recorder
        self.release = release
        self._bundles = {bundle.card.name: bundle for bundle in predictor.bundles}
        self._summaries = {name: model_summary(bundle) for name, bundle in self._bundles.items()}
        self._origin = {"release": release, "feature_schema": FEATURE_SCHEMA}
        self.families = tuple(
            dict.fromkeys(family for bundle in predictor.bundles for family in bundle.card.families)
        )

    def predict(self, body: bytes) -> Document:
        """The response to ``POST /v1/predict``.

        Raises:
            InvalidRequestError, InvalidJobError, UnsupportedJobError: with the field's path from
            ``body``.
        """
        result = self.predict_requests([read_job_request(body)])[0]
        if isinstance(result, FieldError):
            raise result
        return result

    def predict_requests(self, requests: Sequence[JobRequest]) -> list[Document | FieldError]:
        """The prediction or the error of each request; requests with equal options are predicted as
        one table."""
        results: list[Document | FieldError] = [{} for _ in requests]
        rows_of: dict[Options, list[int]] = {}
        for row, request in enumerate(requests):
            rows_of.setdefault(request.options, []).append(row)
        for options, rows in rows_of.items():
            jobs = self.read(
                [requests[row].job for row in rows], options.encoder, lambda row: "job"
            )
            try:
                documents: Sequence[Document | FieldError] = self._documents(jobs.table, options)
            except FieldError as error:  # an invalid option
                documents = [error] * len(jobs.table)
            for row, result in zip(rows, _in_order(jobs, documents), strict=True):
                results[row] = result
        return results

    def predict_batch(self, body: bytes) -> Document:
        """The response to ``POST /v1/predict/batch``: for every job, in order, its prediction or
        its problem.

        Raises:
            InvalidRequestError: when the request itself is invalid, and not just one of its jobs.
        """
        request = read_request(body, BatchRequest)
        if len(request.jobs) > MAX_JOBS:
            raise InvalidRequestError(
                f"must hold at most {MAX_JOBS} jobs, not {len(request.jobs)}: send them in several requests",
                "jobs",
            )
        options = options_of(request)
        _check_size(len(request.jobs), options)
        jobs = self.read(request.jobs, options.encoder, "jobs[{}]".format)
        results = [
            {"problem": problem_document(result)}
            if isinstance(result, FieldError)
            else {"prediction": _chosen(result, request.fields)}
            for result in _in_order(jobs, self._documents(jobs.table, options))
        ]
        return {"failed": len(jobs.errors), "results": results}

    def read(
        self, documents: Sequence[Any], encoder: str | None, path: Callable[[int], str]
    ) -> ReadJobs:
        """The valid jobs, and the errors of the others, with the field's path from the request.

        Args:
            documents: the JSON documents of the jobs.
            encoder: the classifier to use; ``None`` for the predictor's choice.
            path: maps a job's index to its path in the request.
        """
        read = self.predictor.accepted(read_jobs(documents), encoder)
        if not read.errors:
            return read
        # `encoder` is a member of the request, not of a job: its path stays.
        located_errors = {
            row: error if error.field == "encoder" else error_at(error, path(row), ".")
            for row, error in read.errors.items()
        }
        return read._replace(errors=located_errors)

    def _documents(self, jobs: JobTable, options: Options) -> list[Document]:
        """The JSON documents of the predictions for ``jobs``."""
        if not len(jobs):  # no job asks a model, and the options must be valid all the same
            self.predictor.prediction_gpu(options.gpu)
            self.predictor.model(options.encoder).level(options.coverage)
            return []
        predictions = self.predictor.predict_table(jobs, options)
        identities = self._record(jobs, predictions)
        documents = [
            {
                "prediction_id": identity,
                **document,
                **self._origin,
                "model": self._summaries[document["model"]["name"]],
            }
            for identity, document in zip(identities, predictions.documents(), strict=True)
        ]
        if options.targets is not None:
            found = fits_table(
                self.predictor,
                jobs,
                options.targets,
                coverage=options.coverage,
                encoder=options.encoder,
            )
            for document, fits in zip(documents, found, strict=True):
                document["fits"] = fits
        return documents

    def batch_sizes(self, body: bytes) -> Document:
        """The largest batches that fit a GPU, and memory against batch size.

        Raises:
            InvalidRequestError, InvalidJobError, UnsupportedJobError: with the field's path from
            ``body``.
        """
        request = read_request(body, BatchSizesRequest)
        coverage = DEFAULT_COVERAGE if request.coverage is None else request.coverage
        read = self.read([request.job], request.encoder, lambda row: "job")
        for error in read.errors.values():
            raise error
        job = read.table[0]
        gpu = request.gpu or self.predictor.prediction_gpu(None).gpu
        found = batch_sizes(
            self.predictor,
            job,
            target(gpu, free_mib=request.free_mib),
            coverage=coverage,
            encoder=request.encoder,
            max_batch=request.max_batch or DEFAULT_MAX_BATCH,
        )
        document = asdict(found) | self._origin
        del document["device"]
        return document

    def _record(self, jobs: JobTable, predictions: PredictionTable) -> list[str]:
        """Count and record new predictions; returns their ids."""
        now_nanoseconds = time.time_ns()
        identities = [prediction_id(now_nanoseconds) for _ in range(len(jobs))]
        in_support = predictions.in_support.tolist()
        families = jobs.options("family")
        for (code, is_inside), number in Counter(
            zip(jobs.option_codes.tolist(), in_support, strict=True)
        ).items():
            labelled(PREDICTIONS, families[code], str(is_inside).lower()).inc(number)
        if self._recorder is not None:
            sha256 = self._bundles[predictions.model.name].sha256
            self._recorder.record(
                RecordBatch(
                    identities, now_nanoseconds / 1e9, jobs, predictions, sha256, self.release
                )
            )
        return identities

    def models(self) -> list[Document]:
        """The loaded models, as ``GET /v1/models`` lists them."""
        return [
            {
                **model_summary(bundle),
                "gpu": bundle.card.gpu,
                "coverages": bundle.card.coverages,
                "card": bundle.card.document,
            }
            for bundle in self.predictor.bundles
        ]


def _in_order(
    jobs: ReadJobs, documents: Sequence[Document | FieldError]
) -> list[Document | FieldError]:
    """The results and errors, by position in the request."""
    results = jobs.errors | dict(zip(jobs.rows.tolist(), documents, strict=True))
    return [results[row] for row in range(len(results))]


def _chosen(document: Document, fields: Sequence[str] | None) -> Document:
    """The fields of a prediction that a batch asks for; all without a choice."""
    return document if fields is None else {name: document.get(name) for name in fields}


def _check_size(jobs: int, options: Options) -> None:
    bins = options.bins
    if bins is not None and jobs * bins.count > MAX_PROBABILITIES:
        raise InvalidRequestError(
            f"gives {bins.count} bins for each of {jobs} jobs, and an answer holds at most {MAX_PROBABILITIES} probabilities: "
            "ask for wider bins or for fewer jobs at a time",
            "bin_width_mib",
        )
    targets = options.targets or ()
    if jobs * len(targets) > MAX_FITS:
        raise InvalidRequestError(
            f"gives {len(targets)} verdicts for each of {jobs} jobs, and an answer holds at most {MAX_FITS}: "
            "name fewer GPUs or send fewer jobs at a time",
            "fits",
        )


TRAINING_DATA_FIELDS: Final = ("description", "provenance", "label_source", "licence")
"""The members of a card's training data that every prediction repeats; ``GET /v1/models`` has the
rest."""


@cache
def gpus_document() -> Document:
    """The response to ``GET /v1/gpus``."""
    return {
        "gpus": [
            {
                "name": profile.name,
                "aliases": profile.aliases,
                "capacity_mib": profile.capacity_bytes // MIB,
                "reserved_mib": reserve(profile.name)[0],
                "reserved_source": reserve(profile.name)[1],
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


def model_summary(bundle: Bundle) -> Document:
    """The model, as predictions name it."""
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


def prediction_id(now_nanoseconds: int) -> str:
    """A new id for a prediction made at ``now_nanoseconds`` since the epoch: a UUID of version 7
    (RFC 9562, section 5.7), which sorts by creation time."""
    stamp, digits = f"{now_nanoseconds // 1_000_000:012x}", os.urandom(10).hex()
    variant = "89ab"[int(digits[3], 16) % 4]
    return f"{stamp[:8]}-{stamp[8:12]}-7{digits[:3]}-{variant}{digits[4:7]}-{digits[7:19]}"
