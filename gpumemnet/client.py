"""Asks a running service for predictions, from a scheduler or a script, and answers as the in-process predictor does.

:class:`Client` and :class:`AsyncClient` share one core that writes requests and reads answers and does no input or output itself
(the sans-IO pattern); each only sends.  The time-out is short, because a scheduler goes on without an answer rather than wait.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Required, Self, TypedDict, TypeVar, Unpack

import numpy as np

from gpumemnet.bins import PUBLISHED_BINS, BinScheme, bins_of_width
from gpumemnet.errors import InvalidRequestError, MissingExtraError, ServiceError
from gpumemnet.estimate import DEFAULT_COVERAGE, Estimate
from gpumemnet.fits import Fit
from gpumemnet.inverse import DEFAULT_MAX_BATCH, BatchPoint, BatchSizes, SmallestGpu
from gpumemnet.job import TrainingJob
from gpumemnet.job_json import job_to_dict
from gpumemnet.units import MIB

if TYPE_CHECKING:
    import httpx

URL_VARIABLE: Final = "GPUMEMNET_URL"
API_KEY_VARIABLE: Final = "GPUMEMNET_API_KEY"
DEFAULT_URL: Final = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_SECONDS: Final = 0.5

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prediction(Estimate):
    """An estimate as a service gives it.

    Attributes:
        prediction_id: its id; give it back with what the job really took (:meth:`Client.observe`).
        request_mib: what to pack by: the expected memory in MiB, rounded up.
        limit_mib: what to cap at: the safe memory in MiB, rounded up; ``None`` outside the model's support.
        release: the release that answered.
        model_sha256: hash over the files of the model that answered.
        feature_schema: version of the features that it looks at.
        fits: what the job fits, in the order asked; empty where that was not asked.
    """

    prediction_id: str
    request_mib: int
    limit_mib: int | None
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
    """What one run of a job really took; :mod:`gpumemnet.observation` says what each may hold.

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
class _Call(Generic[T]):
    """One request, and how its answer is read.

    Attributes:
        method, path: of the request.
        body: JSON, or ``None`` for a request without.
        read: turns the answer's JSON into the result; what it raises on a foreign document becomes a ServiceError.
        statuses: the HTTP statuses of success.
    """

    method: str
    path: str
    read: Callable[[Any], T]
    body: bytes | None = None
    statuses: tuple[int, ...] = (200,)


@dataclass(frozen=True, slots=True)
class _Options:
    """How a prediction is wanted; see :meth:`Client.predict`."""

    bins: BinScheme | None
    coverage: float
    gpu: str | None
    encoder: str | None
    fits: bool | Sequence[str]
    devices: Sequence[Device] | None

    def members(self) -> dict[str, Any]:
        """Of the request's body."""
        fits = self.fits if isinstance(self.fits, bool) else list(self.fits)
        wanted = {"gpu": self.gpu, "encoder": self.encoder, "fits": fits, "devices": _listed(self.devices)}
        return _bins_and_coverage(self.bins, self.coverage) | _given(wanted)


def _predict(job: TrainingJob, options: _Options) -> _Call[Prediction]:
    body = {"job": job_to_dict(job), **options.members()}
    return _Call("POST", "/v1/predict", _prediction, json.dumps(body).encode())


def _predict_many(jobs: Sequence[TrainingJob], options: _Options) -> _Call[list[Prediction | ServiceError]]:
    body = {"jobs": [job_to_dict(job) for job in jobs], **options.members()}

    def read(document: Any) -> list[Prediction | ServiceError]:
        results = [_result(result) for result in document["results"]]
        if len(results) != len(jobs):
            raise ValueError("as many results as jobs are expected")
        return results

    return _Call("POST", "/v1/predict/batch", read, json.dumps(body).encode())


def _batch_sizes(job: TrainingJob, **options: Any) -> _Call[BatchSizes]:
    def read(document: Any) -> BatchSizes:
        fields = ("gpu", "mig", "available_mib", "coverage", "max_batch", "safe_batch", "likely_batch")
        return BatchSizes(
            **{name: document[name] for name in fields},
            device=None,
            reasons=tuple(document["reasons"]),
            curve=tuple(BatchPoint(**point) for point in document["curve"]),
        )

    return _Call("POST", "/v1/batch-sizes", read, json.dumps({"job": job_to_dict(job), **_given(options)}).encode())


def _smallest_gpu(job: TrainingJob, **options: Any) -> _Call[SmallestGpu]:
    def read(document: Any) -> SmallestGpu:
        safe, likely = (None if document[name] is None else Fit(**document[name]) for name in ("safe", "likely"))
        return SmallestGpu(coverage=document["coverage"], safe=safe, likely=likely, reasons=tuple(document["reasons"]))

    return _Call("POST", "/v1/smallest-gpu", read, json.dumps({"job": job_to_dict(job), **_given(options)}).encode())


def _observe(observed: Observed) -> _Call[dict[str, Any]]:
    members: dict[str, Any] = {**observed}
    if observed.get("job") is not None:
        members["job"] = job_to_dict(observed["job"])
    if observed.get("observed_at") is not None:
        members["observed_at"] = observed["observed_at"].isoformat()
    return _Call("POST", "/v1/observations", _document, json.dumps(_given(members)).encode(), (200, 201))


def _document(document: Any) -> dict[str, Any]:
    return {**document}


def _given(members: Mapping[str, Any]) -> dict[str, Any]:
    """What differs from the service's own choice."""
    return {name: value for name, value in members.items() if value is not None and value is not False}


def _listed(values: Iterable[Any] | None) -> list[Any] | None:
    return None if values is None else list(values)


_MODELS: Final[_Call[list[dict[str, Any]]]] = _Call("GET", "/v1/models", lambda document: list(document["models"]))
_GPUS: Final[_Call[list[dict[str, Any]]]] = _Call("GET", "/v1/gpus", lambda document: list(document["gpus"]))
_HEALTH: Final[_Call[tuple[str, ...]]] = _Call("GET", "/readyz", lambda document: tuple(document["families"]))


def _bins_and_coverage(bins: BinScheme | None, coverage: float) -> dict[str, Any]:
    if bins is None:
        return {"coverage": coverage}
    if bins == PUBLISHED_BINS.get(bins.name):
        return {"coverage": coverage, "bins": bins.name}
    if bins.width_bytes % MIB or bins != bins_of_width(bins.width_bytes):
        raise InvalidRequestError(
            "must be a published scheme or bins_of_width(…) of whole MiB: the service knows no others", "bins"
        )
    return {"coverage": coverage, "bin_width_mib": bins.width_bytes // MIB}


def _prediction(document: Any) -> Prediction:
    bins = document["bins"]
    probabilities = np.array(bins["probabilities"], dtype=np.float64)
    if probabilities.shape != (bins["count"],):
        raise ValueError("one probability per bin is expected")
    return Prediction(
        expected_bytes=document["expected_bytes"],
        safe_bytes=document["safe_bytes"],
        coverage=document["coverage"],
        bins=BinScheme(bins["width_bytes"], bins["count"], bins["name"]),
        probabilities=probabilities,
        in_support=document["in_support"],
        reasons=tuple(document["reasons"]),
        gpu=document["gpu"],
        estimator=document["model"]["name"],
        version=document["model"]["version"],
        label_source=document["label_source"],
        prediction_id=document["prediction_id"],
        request_mib=document["request_mib"],
        limit_mib=document["limit_mib"],
        release=document["release"],
        model_sha256=document["model"]["sha256"],
        feature_schema=document["feature_schema"],
        fits=tuple(Fit(**fit) for fit in document.get("fits") or ()),
    )


def _result(result: Mapping[str, Any]) -> Prediction | ServiceError:
    if "prediction" in result:
        return _prediction(result["prediction"])
    problem = result["problem"]
    return ServiceError(problem["detail"], problem["status"], problem)


def _read(call: _Call[T], url: str, status: int, content: bytes) -> T:
    """The result of ``call`` from the answer to it.

    Raises:
        ServiceError: when the answer is a problem, or none that a gpumemnet service gives.
    """
    try:
        document = json.loads(content)
        if status in call.statuses:
            return call.read(document)
        message = f"the service at {url} refused: {document['detail']}"
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ServiceError(
            f"{url}{call.path} answered with status {status} and no document of this service: is the URL right?", status
        ) from None
    raise ServiceError(message, status, document)


class _ClientCore:
    """What both clients are made of: the URL, the time-out, the key, and the errors of the transport in words."""

    def __init__(self, url: str | None, timeout_seconds: float, api_key: str | None) -> None:
        key = os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key
        if key and not (key.isascii() and key.isprintable() and " " not in key):
            raise InvalidRequestError("must be printable ASCII without spaces", "api_key")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url = (url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/")
        self.timeout_seconds = timeout_seconds
        self._httpx = _httpx()

    def _arguments(self, call: _Call[Any]) -> dict[str, Any]:
        headers = self._headers if call.body is None else {**self._headers, "Content-Type": "application/json"}
        return {"method": call.method, "url": self.url + call.path, "content": call.body, "headers": headers}

    def _unreachable(self, error: Exception) -> ServiceError:
        if isinstance(error, self._httpx.TimeoutException):
            return ServiceError(f"the service at {self.url} did not answer within {self.timeout_seconds:g} s")
        return ServiceError(f"the service at {self.url} cannot be reached: {str(error) or type(error).__name__}")


class Client(_ClientCore):
    """Asks a service and waits for the answer.

    Keeps connections open between calls; close it, or use it in a ``with`` statement.  May be shared by threads.

    Args:
        url: address of the service; the variable ``GPUMEMNET_URL`` unless given, and ``http://127.0.0.1:8000`` without either.
        timeout_seconds: for connecting, for sending and for each wait for the answer.
        api_key: key of the service, where it asks for one; the variable ``GPUMEMNET_API_KEY`` unless given.

    Raises:
        MissingExtraError: when httpx is not installed.
        InvalidRequestError: on a key that no header can carry.
    """

    def __init__(
        self, url: str | None = None, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS, api_key: str | None = None
    ) -> None:
        super().__init__(url, timeout_seconds, api_key)
        self._http: httpx.Client = self._httpx.Client(timeout=timeout_seconds)

    def predict(
        self,
        job: TrainingJob,
        *,
        bins: BinScheme | None = None,
        coverage: float = DEFAULT_COVERAGE,
        gpu: str | None = None,
        encoder: str | None = None,
        fits: bool | Sequence[str] = False,
        devices: Sequence[Device] | None = None,
    ) -> Prediction:
        """The estimate of one job.

        Args:
            job: the job.
            bins: a published scheme, or ``bins_of_width`` of whole MiB; the model's own unless given.
            coverage: share of jobs that the safe bytes shall cover.
            gpu: GPU to answer for; the one that the model learnt from unless given.
            encoder: ``mlp``, ``transformer`` or ``common``.
            fits: also say what the job fits: ``True`` for the whole catalogue, or names such as ``A100`` and ``A100/3g.20gb``.
            devices: devices of the site that it may fit, with their live free memory.

        Raises:
            InvalidRequestError: on bins that the service does not know.
            ServiceError: when the service cannot be reached in time, or refuses; ``problem`` then holds its document.
        """
        return self._send(_predict(job, _Options(bins, coverage, gpu, encoder, fits, devices)))

    def predict_many(
        self,
        jobs: Sequence[TrainingJob],
        *,
        bins: BinScheme | None = None,
        coverage: float = DEFAULT_COVERAGE,
        gpu: str | None = None,
        encoder: str | None = None,
        fits: bool | Sequence[str] = False,
        devices: Sequence[Device] | None = None,
    ) -> list[Prediction | ServiceError]:
        """For every job, in order, its estimate or the error that it was refused with; otherwise as :meth:`predict`."""
        return self._send(_predict_many(jobs, _Options(bins, coverage, gpu, encoder, fits, devices)))

    def batch_sizes(
        self,
        job: TrainingJob,
        *,
        gpu: str | None = None,
        mig: str | None = None,
        free_mib: int | None = None,
        coverage: float = DEFAULT_COVERAGE,
        encoder: str | None = None,
        max_batch: int = DEFAULT_MAX_BATCH,
    ) -> BatchSizes:
        """The largest batches that fit a GPU, and memory against batch size.

        Args:
            job: the job; its own batch size does not matter.
            gpu: where it is to run, such as ``A100`` or ``A100/3g.20gb``; the GPU that the model learnt from unless given.
            mig: the MIG profile, unless ``gpu`` names it.
            free_mib: memory free there now; all that an empty one has unless given.
            coverage: share of jobs that stay below a limit.
            encoder: ``mlp``, ``transformer`` or ``common``.
            max_batch: the largest batch size to look at.

        Raises:
            ServiceError: as :meth:`predict`.
        """
        options = {"gpu": gpu, "mig": mig, "free_mib": free_mib, "encoder": encoder}
        return self._send(_batch_sizes(job, coverage=coverage, max_batch=max_batch, **options))

    def smallest_gpu(
        self,
        job: TrainingJob,
        *,
        gpus: Sequence[str] | None = None,
        devices: Sequence[Device] | None = None,
        coverage: float = DEFAULT_COVERAGE,
        encoder: str | None = None,
    ) -> SmallestGpu:
        """The smallest GPU or MIG profile that holds a job.

        Args:
            job: the job.
            gpus: names to choose from, such as ``A100`` and ``A100/3g.20gb``; the whole catalogue unless given.
            devices: devices to choose from, with their live free memory.
            coverage: share of jobs that stay below the limit.
            encoder: ``mlp``, ``transformer`` or ``common``.

        Raises:
            ServiceError: as :meth:`predict`.
        """
        options = {"gpus": _listed(gpus), "devices": _listed(devices), "encoder": encoder}
        return self._send(_smallest_gpu(job, coverage=coverage, **options))

    def observe(self, **observed: Unpack[Observed]) -> dict[str, Any]:
        """Tell the service what a job really took; returns its answer once that is stored.

        Args:
            observed: see :class:`Observed`; the id of the prediction, or the job and its GPU, the source and the peak.

        Raises:
            ServiceError: as :meth:`predict`.
        """
        return self._send(_observe(observed))

    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs that the service knows, with their MIG profiles.

        Raises:
            ServiceError: as :meth:`predict`.
        """
        return self._send(_GPUS)

    def models(self) -> list[dict[str, Any]]:
        """The models that the service has loaded, with their cards.

        Raises:
            ServiceError: as :meth:`predict`.
        """
        return self._send(_MODELS)

    def health(self) -> tuple[str, ...]:
        """The families of jobs that the service is ready to answer for.

        Raises:
            ServiceError: when it is not ready, or cannot be reached in time.
        """
        return self._send(_HEALTH)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _send(self, call: _Call[T]) -> T:
        try:
            response = self._http.request(**self._arguments(call))
        except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        return _read(call, self.url, response.status_code, response.content)


class AsyncClient(_ClientCore):
    """As :class:`Client`, for ``asyncio``; use it in an ``async with`` statement, or close it."""

    def __init__(
        self, url: str | None = None, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS, api_key: str | None = None
    ) -> None:
        super().__init__(url, timeout_seconds, api_key)
        self._http: httpx.AsyncClient = self._httpx.AsyncClient(timeout=timeout_seconds)

    async def predict(
        self,
        job: TrainingJob,
        *,
        bins: BinScheme | None = None,
        coverage: float = DEFAULT_COVERAGE,
        gpu: str | None = None,
        encoder: str | None = None,
        fits: bool | Sequence[str] = False,
        devices: Sequence[Device] | None = None,
    ) -> Prediction:
        """See :meth:`Client.predict`."""
        return await self._send(_predict(job, _Options(bins, coverage, gpu, encoder, fits, devices)))

    async def predict_many(
        self,
        jobs: Sequence[TrainingJob],
        *,
        bins: BinScheme | None = None,
        coverage: float = DEFAULT_COVERAGE,
        gpu: str | None = None,
        encoder: str | None = None,
        fits: bool | Sequence[str] = False,
        devices: Sequence[Device] | None = None,
    ) -> list[Prediction | ServiceError]:
        """See :meth:`Client.predict_many`."""
        return await self._send(_predict_many(jobs, _Options(bins, coverage, gpu, encoder, fits, devices)))

    async def batch_sizes(
        self,
        job: TrainingJob,
        *,
        gpu: str | None = None,
        mig: str | None = None,
        free_mib: int | None = None,
        coverage: float = DEFAULT_COVERAGE,
        encoder: str | None = None,
        max_batch: int = DEFAULT_MAX_BATCH,
    ) -> BatchSizes:
        """See :meth:`Client.batch_sizes`."""
        options = {"gpu": gpu, "mig": mig, "free_mib": free_mib, "encoder": encoder}
        return await self._send(_batch_sizes(job, coverage=coverage, max_batch=max_batch, **options))

    async def smallest_gpu(
        self,
        job: TrainingJob,
        *,
        gpus: Sequence[str] | None = None,
        devices: Sequence[Device] | None = None,
        coverage: float = DEFAULT_COVERAGE,
        encoder: str | None = None,
    ) -> SmallestGpu:
        """See :meth:`Client.smallest_gpu`."""
        options = {"gpus": _listed(gpus), "devices": _listed(devices), "encoder": encoder}
        return await self._send(_smallest_gpu(job, coverage=coverage, **options))

    async def observe(self, **observed: Unpack[Observed]) -> dict[str, Any]:
        """See :meth:`Client.observe`."""
        return await self._send(_observe(observed))

    async def gpus(self) -> list[dict[str, Any]]:
        """See :meth:`Client.gpus`."""
        return await self._send(_GPUS)

    async def models(self) -> list[dict[str, Any]]:
        """See :meth:`Client.models`."""
        return await self._send(_MODELS)

    async def health(self) -> tuple[str, ...]:
        """See :meth:`Client.health`."""
        return await self._send(_HEALTH)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _send(self, call: _Call[T]) -> T:
        try:
            response = await self._http.request(**self._arguments(call))
        except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        return _read(call, self.url, response.status_code, response.content)


def _httpx() -> ModuleType:
    try:
        import httpx
    except ImportError:
        raise MissingExtraError("httpx", "client", "asking a service") from None
    return httpx
