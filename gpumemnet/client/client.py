"""Asks a running service for predictions, from a scheduler or a script, and answers as the
in-process predictor does.

:class:`Client` and :class:`AsyncClient` only send: requests are written and answers read by
:mod:`gpumemnet.client.calls`.  The time-out is short, because a scheduler goes on without an answer
rather than wait.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, Unpack

from gpumemnet.client.calls import (
    GPUS,
    HEALTH,
    MODELS,
    Call,
    Observed,
    RequestOptions,
    ServedPrediction,
    batch_sizes_call,
    observe_call,
    predict_call,
    predict_many_call,
    result_of,
)
from gpumemnet.errors import InvalidRequestError, MissingExtraError, ServiceError
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.largest_batch import DEFAULT_MAX_BATCH, BatchSizes
from gpumemnet.predict.prediction import DEFAULT_COVERAGE

if TYPE_CHECKING:
    import httpx

URL_VARIABLE: Final = "GPUMEMNET_URL"
API_KEY_VARIABLE: Final = "GPUMEMNET_API_KEY"
DEFAULT_URL: Final = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_SECONDS: Final = 0.5

T = TypeVar("T")


class _ClientCore:
    """What both clients share: URL, time-out, API key, and sentences for transport errors."""

    def __init__(self, url: str | None, timeout_seconds: float, api_key: str | None) -> None:
        key = os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key
        if key and not (key.isascii() and key.isprintable() and " " not in key):
            raise InvalidRequestError("must be printable ASCII without spaces", "api_key")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url = (url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/")
        self.timeout_seconds = timeout_seconds
        self._httpx = _httpx()

    def _arguments(self, call: Call[Any]) -> dict[str, Any]:
        headers = (
            self._headers
            if call.body is None
            else {**self._headers, "Content-Type": "application/json"}
        )
        return {
            "method": call.method,
            "url": self.url + call.path,
            "content": call.body,
            "headers": headers,
        }

    def _unreachable(self, error: Exception) -> ServiceError:
        if isinstance(error, self._httpx.TimeoutException):
            return ServiceError(
                f"the service at {self.url} did not answer within {self.timeout_seconds:g} s"
            )
        return ServiceError(
            f"the service at {self.url} cannot be reached: {str(error) or type(error).__name__}"
        )


class Client(_ClientCore):
    """Asks a service and waits for the answer.

    Keeps connections open between calls; close it, or use it in a ``with`` statement.  May be
    shared by threads.

    Args:
        url: address of the service; the variable ``GPUMEMNET_URL`` unless given, and
            ``http://127.0.0.1:8000`` without either.
        timeout_seconds: for connecting, for sending and for each wait for the answer.
        api_key: key of the service, where it asks for one; the variable ``GPUMEMNET_API_KEY``
            unless given.

    Raises:
        MissingExtraError: when httpx is not installed.
        InvalidRequestError: on a key with characters that an HTTP header cannot hold.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        api_key: str | None = None,
    ) -> None:
        super().__init__(url, timeout_seconds, api_key)
        self._http: httpx.Client = self._httpx.Client(timeout=timeout_seconds)

    def predict(self, job: TrainingJob, **options: Any) -> ServedPrediction:
        """The prediction for one job.

        Args:
            job: the job.
            options: see :class:`~gpumemnet.client.calls.RequestOptions`.

        Raises:
            InvalidRequestError: for bins that the service does not know.
            ServiceError: when the service cannot be reached in time, or refuses; ``problem`` then
                holds its document.
        """
        return self._send(predict_call(job, RequestOptions(**options)))

    def predict_many(
        self, jobs: Sequence[TrainingJob], **options: Any
    ) -> list[ServedPrediction | ServiceError]:
        """The prediction for each job, or its error, in order; options and errors as in
        :meth:`predict`."""
        return self._send(predict_many_call(jobs, RequestOptions(**options)))

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
            gpu: where it is to run, such as ``A100`` or ``A100/3g.20gb``; the GPU that the model
                learned from unless given.
            mig: the MIG profile, unless ``gpu`` names it.
            free_mib: memory free there now; all that an empty one has unless given.
            coverage: share of jobs that stay below a limit.
            encoder: ``mlp``, ``transformer`` or ``common``.
            max_batch: the largest batch size to look at.

        Raises:
            ServiceError: as :meth:`predict`.
        """
        options = {"gpu": gpu, "mig": mig, "free_mib": free_mib, "encoder": encoder}
        return self._send(batch_sizes_call(job, coverage=coverage, max_batch=max_batch, **options))

    def observe(self, **observed: Unpack[Observed]) -> dict[str, Any]:
        """Tell the service what a job really took; returns its answer once that is stored.

        Args:
            observed: see :class:`Observed`; the id of the prediction, or the job and its GPU, the
                source and the peak.

        Raises:
            ServiceError: as :meth:`predict`.
        """
        return self._send(observe_call(observed))

    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs that the service knows, with their MIG profiles.

        Raises:
            ServiceError: as :meth:`predict`.
        """
        return self._send(GPUS)

    def models(self) -> list[dict[str, Any]]:
        """The models that the service has loaded, with their cards.

        Raises:
            ServiceError: as :meth:`predict`.
        """
        return self._send(MODELS)

    def health(self) -> tuple[str, ...]:
        """The families of jobs that the service is ready to answer for.

        Raises:
            ServiceError: when it is not ready, or cannot be reached in time.
        """
        return self._send(HEALTH)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _send(self, call: Call[T]) -> T:
        try:
            response = self._http.request(**self._arguments(call))
        except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        return result_of(call, self.url, response.status_code, response.content)


class AsyncClient(_ClientCore):
    """As :class:`Client`, for ``asyncio``; use it in an ``async with`` statement, or close it."""

    def __init__(
        self,
        url: str | None = None,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        api_key: str | None = None,
    ) -> None:
        super().__init__(url, timeout_seconds, api_key)
        self._http: httpx.AsyncClient = self._httpx.AsyncClient(timeout=timeout_seconds)

    async def predict(self, job: TrainingJob, **options: Any) -> ServedPrediction:
        """See :meth:`Client.predict`."""
        return await self._send(predict_call(job, RequestOptions(**options)))

    async def predict_many(
        self, jobs: Sequence[TrainingJob], **options: Any
    ) -> list[ServedPrediction | ServiceError]:
        """See :meth:`Client.predict_many`."""
        return await self._send(predict_many_call(jobs, RequestOptions(**options)))

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
        return await self._send(
            batch_sizes_call(job, coverage=coverage, max_batch=max_batch, **options)
        )

    async def observe(self, **observed: Unpack[Observed]) -> dict[str, Any]:
        """See :meth:`Client.observe`."""
        return await self._send(observe_call(observed))

    async def gpus(self) -> list[dict[str, Any]]:
        """See :meth:`Client.gpus`."""
        return await self._send(GPUS)

    async def models(self) -> list[dict[str, Any]]:
        """See :meth:`Client.models`."""
        return await self._send(MODELS)

    async def health(self) -> tuple[str, ...]:
        """See :meth:`Client.health`."""
        return await self._send(HEALTH)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _send(self, call: Call[T]) -> T:
        try:
            response = await self._http.request(**self._arguments(call))
        except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        return result_of(call, self.url, response.status_code, response.content)


def _httpx() -> ModuleType:
    try:
        import httpx
    except ImportError:
        raise MissingExtraError("httpx", "client", "asking a service") from None
    return httpx
