"""Asks a running service for predictions, from a scheduler or a script, and answers as the in-process predictor does.

:class:`Client` and :class:`AsyncClient` share one core that writes requests and reads answers and does no input or output itself
(the sans-IO pattern); each only sends.  The time-out is short, because a scheduler goes on without an answer rather than wait.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Self, TypeVar

import numpy as np

from gpumemnet.bins import PUBLISHED_BINS, BinScheme, bins_of_width
from gpumemnet.errors import InvalidRequestError, MissingExtraError, ServiceError
from gpumemnet.estimate import DEFAULT_COVERAGE, Estimate
from gpumemnet.job import TrainingJob
from gpumemnet.job_json import job_to_dict
from gpumemnet.units import MIB

if TYPE_CHECKING:
    import httpx

URL_VARIABLE: Final = "GPUMEMNET_URL"
DEFAULT_URL: Final = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_SECONDS: Final = 0.5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Call(Generic[T]):
    """One request, and how its answer is read.

    Attributes:
        method, path: of the request.
        body: JSON, or ``None`` for a request without.
        read: turns the answer's JSON into the result; what it raises on a foreign document becomes a ServiceError.
    """

    method: str
    path: str
    read: Callable[[Any], T]
    body: bytes | None = None


def _predict(job: TrainingJob, bins: BinScheme | None, coverage: float) -> _Call[Estimate]:
    body = {"job": job_to_dict(job), **_options(bins, coverage)}
    return _Call("POST", "/v1/predict", _estimate, json.dumps(body).encode())


def _predict_many(jobs: Sequence[TrainingJob], bins: BinScheme | None, coverage: float) -> _Call[list[Estimate | ServiceError]]:
    body = {"jobs": [job_to_dict(job) for job in jobs], **_options(bins, coverage)}

    def read(document: Any) -> list[Estimate | ServiceError]:
        results = [_result(result) for result in document["results"]]
        if len(results) != len(jobs):
            raise ValueError("as many results as jobs are expected")
        return results

    return _Call("POST", "/v1/predict/batch", read, json.dumps(body).encode())


_MODELS: Final[_Call[list[dict[str, Any]]]] = _Call("GET", "/v1/models", lambda document: list(document["models"]))
_HEALTH: Final[_Call[tuple[str, ...]]] = _Call("GET", "/readyz", lambda document: tuple(document["families"]))


def _options(bins: BinScheme | None, coverage: float) -> dict[str, Any]:
    if bins is None:
        return {"coverage": coverage}
    if bins == PUBLISHED_BINS.get(bins.name):
        return {"coverage": coverage, "bins": bins.name}
    if bins.width_bytes % MIB or bins != bins_of_width(bins.width_bytes):
        raise InvalidRequestError(
            "must be a published scheme or bins_of_width(…) of whole MiB: the service knows no others", "bins"
        )
    return {"coverage": coverage, "bin_width_mib": bins.width_bytes // MIB}


def _estimate(document: Any) -> Estimate:
    bins = document["bins"]
    probabilities = np.array(bins["probabilities"], dtype=np.float64)
    if probabilities.shape != (bins["count"],):
        raise ValueError("one probability per bin is expected")
    return Estimate(
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
    )


def _result(result: Mapping[str, Any]) -> Estimate | ServiceError:
    if "prediction" in result:
        return _estimate(result["prediction"])
    problem = result["problem"]
    return ServiceError(problem["detail"], problem["status"], problem)


def _read(call: _Call[T], url: str, status: int, content: bytes) -> T:
    """The result of ``call`` from the answer to it.

    Raises:
        ServiceError: when the answer is a problem, or none that a gpumemnet service gives.
    """
    try:
        document = json.loads(content)
        if status == 200:
            return call.read(document)
        message = f"the service at {url} refused: {document['detail']}"
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ServiceError(
            f"{url}{call.path} answered with status {status} and no document of this service: is the URL right?", status
        ) from None
    raise ServiceError(message, status, document)


class _ClientCore:
    """What both clients are made of: the URL, the time-out, and the errors of the transport in words."""

    def __init__(self, url: str | None, timeout_seconds: float) -> None:
        self.url = (url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/")
        self.timeout_seconds = timeout_seconds
        self._httpx = _httpx()

    def _arguments(self, call: _Call[Any]) -> dict[str, Any]:
        headers = {} if call.body is None else {"Content-Type": "application/json"}
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

    Raises:
        MissingExtraError: when httpx is not installed.
    """

    def __init__(self, url: str | None = None, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        super().__init__(url, timeout_seconds)
        self._http: httpx.Client = self._httpx.Client(timeout=timeout_seconds)

    def predict(self, job: TrainingJob, *, bins: BinScheme | None = None, coverage: float = DEFAULT_COVERAGE) -> Estimate:
        """The estimate of one job.

        Args:
            job: the job.
            bins: a published scheme, or ``bins_of_width`` of whole MiB; the model's own unless given.
            coverage: share of jobs that the safe bytes shall cover.

        Raises:
            InvalidRequestError: on bins that the service does not know.
            ServiceError: when the service cannot be reached in time, or refuses; ``problem`` then holds its document.
        """
        return self._send(_predict(job, bins, coverage))

    def predict_many(
        self, jobs: Sequence[TrainingJob], *, bins: BinScheme | None = None, coverage: float = DEFAULT_COVERAGE
    ) -> list[Estimate | ServiceError]:
        """For every job, in order, its estimate or the error that it was refused with; otherwise as :meth:`predict`."""
        return self._send(_predict_many(jobs, bins, coverage))

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

    def __init__(self, url: str | None = None, *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        super().__init__(url, timeout_seconds)
        self._http: httpx.AsyncClient = self._httpx.AsyncClient(timeout=timeout_seconds)

    async def predict(self, job: TrainingJob, *, bins: BinScheme | None = None, coverage: float = DEFAULT_COVERAGE) -> Estimate:
        """See :meth:`Client.predict`."""
        return await self._send(_predict(job, bins, coverage))

    async def predict_many(
        self, jobs: Sequence[TrainingJob], *, bins: BinScheme | None = None, coverage: float = DEFAULT_COVERAGE
    ) -> list[Estimate | ServiceError]:
        """See :meth:`Client.predict_many`."""
        return await self._send(_predict_many(jobs, bins, coverage))

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
