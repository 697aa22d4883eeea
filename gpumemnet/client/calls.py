"""Builds the requests of the clients and reads the answers, without sending anything (the sans-IO
pattern)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Generic, Required, TypedDict, TypeVar

import numpy as np

from gpumemnet.errors import InvalidRequestError, ServiceError
from gpumemnet.job.json_codec import job_to_dict
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.distribution import PUBLISHED_BINS, BinScheme, bins_of_width
from gpumemnet.predict.gpu_fit import Fit
from gpumemnet.predict.largest_batch import BatchPoint, BatchSizes
from gpumemnet.predict.prediction import Prediction, PredictionOptions
from gpumemnet.units import MIB

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ServedPrediction(Prediction):
    """An estimate as a service gives it.

    Attributes:
        prediction_id: its id; give it back with what the job really took
            (:meth:`gpumemnet.client.client.Client.observe`).
        release: the release that answered.
        model_sha256: hash over the files of the model that answered.
        feature_schema: version of the features that it looks at.
        fits: what the job fits, in the order asked; empty where that was not asked.
    """

    prediction_id: str
    release: str
    model_sha256: str
    feature_schema: str
    fits: tuple[Fit, ...] = ()


class Device(TypedDict, total=False):
    """One device of a site, as it is now.

    Attributes:
        id: any name for it, such as the UUID of the GPU or of the MIG instance.
        gpu: its GPU model.
        mig: its MIG profile, where it is a partition.
        free_mib: memory free on it now; unless given it is taken to be empty.
    """

    id: Required[str]
    gpu: Required[str]
    mig: str | None
    free_mib: int | None


class Observed(TypedDict, total=False):
    """The memory that one run of a job really took; see :mod:`gpumemnet.site.observations` for the
    values allowed.

    Attributes:
        prediction_id: id of the prediction that the job was scheduled with.
        job: the job itself, where there is no such id.
        gpu: GPU that it ran on; needed with a job.
        source: who measured, such as ``nvml_process`` or ``slurm_gpumem``.
        peak_mib, peak_bytes: the most that it took; one of the two.
        oom: whether it ran out of memory: it needed more than the peak and the limit.
        limit_mib, limit_bytes: the memory that it could have had.
        observed_at: when it ended, with its time zone.
        idempotency_key: the same observation sent again under the same key is stored once.
    """

    prediction_id: str
    job: TrainingJob
    gpu: str
    source: str
    peak_mib: int
    peak_bytes: int
    oom: bool
    limit_mib: int
    limit_bytes: int
    observed_at: datetime
    idempotency_key: str


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request with the function that reads its answer.

    Attributes:
        method, path: of the request.
        body: JSON, or ``None`` for a request without.
        read: turns the answer's JSON into the result; what it raises on a foreign document becomes
            a ServiceError.
        statuses: the HTTP statuses of success.
    """

    method: str
    path: str
    read: Callable[[Any], T]
    body: bytes | None = None
    statuses: tuple[int, ...] = (200,)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions(PredictionOptions):
    """The options of a prediction by a service.

    Attributes:
        bins: a published scheme, or ``bins_of_width`` of whole MiB; by default as in
            :class:`PredictionOptions`.
        fits: also decide what the job fits: ``True`` for the whole catalogue, or names such as
            ``A100`` and ``A100/3g.20gb``.
        devices: devices of the site that the job may fit, with their free memory.
    """

    fits: bool | Sequence[str] = False
    devices: Sequence[Device] | None = None

    def members(self) -> dict[str, Any]:
        """The members of the request's body."""
        fits = self.fits if isinstance(self.fits, bool) else list(self.fits)
        members = {
            "gpu": self.gpu,
            "encoder": self.encoder,
            "fits": fits,
            "devices": _listed(self.devices),
        }
        return _bins_and_coverage(self.bins, self.coverage) | _given(members)


def predict_call(job: TrainingJob, options: RequestOptions) -> Call[ServedPrediction]:
    """See :meth:`gpumemnet.client.client.Client.predict`."""
    body = {"job": job_to_dict(job), **options.members()}
    return Call("POST", "/v1/predict", _prediction, json.dumps(body).encode())


def predict_many_call(
    jobs: Sequence[TrainingJob], options: RequestOptions
) -> Call[list[ServedPrediction | ServiceError]]:
    """See :meth:`gpumemnet.client.client.Client.predict_many`."""
    body = {"jobs": [job_to_dict(job) for job in jobs], **options.members()}

    def read(document: Any) -> list[ServedPrediction | ServiceError]:
        results = [_result(result) for result in document["results"]]
        if len(results) != len(jobs):
            raise ValueError("as many results as jobs are expected")
        return results

    return Call("POST", "/v1/predict/batch", read, json.dumps(body).encode())


def batch_sizes_call(job: TrainingJob, **options: Any) -> Call[BatchSizes]:
    """See :meth:`gpumemnet.client.client.Client.batch_sizes`, whose ``options`` these are."""

    def read(document: Any) -> BatchSizes:
        fields = (
            "gpu",
            "mig",
            "available_mib",
            "coverage",
            "max_batch",
            "safe_batch",
            "likely_batch",
        )
        return BatchSizes(
            **{name: document[name] for name in fields},
            device=None,
            reasons=tuple(document["reasons"]),
            curve=tuple(BatchPoint(**point) for point in document["curve"]),
        )

    return Call(
        "POST",
        "/v1/batch-sizes",
        read,
        json.dumps({"job": job_to_dict(job), **_given(options)}).encode(),
    )


def observe_call(observed: Observed) -> Call[dict[str, Any]]:
    """See :meth:`gpumemnet.client.client.Client.observe`."""
    members: dict[str, Any] = {**observed}
    if observed.get("job") is not None:
        members["job"] = job_to_dict(observed["job"])
    if observed.get("observed_at") is not None:
        members["observed_at"] = observed["observed_at"].isoformat()
    return Call(
        "POST", "/v1/observations", _document, json.dumps(_given(members)).encode(), (200, 201)
    )


def _document(document: Any) -> dict[str, Any]:
    return {**document}


def _given(members: Mapping[str, Any]) -> dict[str, Any]:
    """The options that differ from the service's defaults."""
    return {
        name: value for name, value in members.items() if value is not None and value is not False
    }


def _listed(values: Iterable[Any] | None) -> list[Any] | None:
    return None if values is None else list(values)


MODELS: Final[Call[list[dict[str, Any]]]] = Call(
    "GET", "/v1/models", lambda document: list(document["models"])
)
GPUS: Final[Call[list[dict[str, Any]]]] = Call(
    "GET", "/v1/gpus", lambda document: list(document["gpus"])
)
HEALTH: Final[Call[tuple[str, ...]]] = Call(
    "GET", "/readyz", lambda document: tuple(document["families"])
)


def _bins_and_coverage(bins: BinScheme | None, coverage: float) -> dict[str, Any]:
    if bins is None:
        return {"coverage": coverage}
    if bins == PUBLISHED_BINS.get(bins.name):
        return {"coverage": coverage, "bins": bins.name}
    if bins.width_bytes % MIB or bins != bins_of_width(bins.width_bytes):
        raise InvalidRequestError(
            "must be a published scheme or bins_of_width(…) of whole MiB: the service knows no others",
            "bins",
        )
    return {"coverage": coverage, "bin_width_mib": bins.width_bytes // MIB}


def _prediction(document: Any) -> ServedPrediction:
    bins = document["bins"]
    probabilities = np.array(bins["probabilities"], dtype=np.float64)
    if probabilities.shape != (bins["count"],):
        raise ValueError("one probability per bin is expected")
    return ServedPrediction(
        expected_bytes=document["expected_bytes"],
        startup_peak_bytes=document["startup_peak_bytes"],
        safe_bytes=document["safe_bytes"],
        coverage=document["coverage"],
        bins=BinScheme(bins["width_bytes"], bins["count"], bins["name"]),
        probabilities=probabilities,
        in_support=document["in_support"],
        reasons=tuple(document["reasons"]),
        gpu=document["gpu"],
        gpu_source=document["gpu_source"],
        context_bytes=document["context_bytes"],
        context_source=document["context_source"],
        estimator=document["model"]["name"],
        version=document["model"]["version"],
        label_source=document["label_source"],
        prediction_id=document["prediction_id"],
        release=document["release"],
        model_sha256=document["model"]["sha256"],
        feature_schema=document["feature_schema"],
        fits=tuple(Fit(**fit) for fit in document.get("fits") or ()),
    )


def _result(result: Mapping[str, Any]) -> ServedPrediction | ServiceError:
    if "prediction" in result:
        return _prediction(result["prediction"])
    problem = result["problem"]
    return ServiceError(problem["detail"], problem["status"], problem)


def result_of(call: Call[T], url: str, status: int, content: bytes) -> T:
    """The result of ``call`` from the answer to it.

    Raises:
        ServiceError: when the answer is a problem document, or not from a gpumemnet service.
    """
    try:
        document = json.loads(content)
        if status in call.statuses:
            return call.read(document)
        message = f"the service at {url} refused: {document['detail']}"
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ServiceError(
            f"{url}{call.path} answered with status {status} and no document of this service: is the URL right?",
            status,
        ) from None
    raise ServiceError(message, status, document)
