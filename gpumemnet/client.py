"""Asks a running service for predictions, from a scheduler or a script, and answers as the
in-process predictor does.

The time-out is short, because a scheduler goes on without an answer rather than wait.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Any,
    Final,
    Required,
    Self,
    TypedDict,
    TypeVar,
)

import numpy as np

from gpumemnet.atomic_files import Document, from_json
from gpumemnet.errors import InvalidRequestError, ServiceError, check_installed
from gpumemnet.job.json_codec import job_to_dict, observed_document
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.distribution import BinScheme, bins_of_width
from gpumemnet.predict.gpu_fit import Fit
from gpumemnet.predict.largest_batch import BatchSizes
from gpumemnet.predict.prediction import Prediction, PredictionOptions
from gpumemnet.units import MIB

URL_VARIABLE: Final = "GPUMEMNET_URL"
API_KEY_VARIABLE: Final = "GPUMEMNET_API_KEY"
DEFAULT_URL: Final = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_SECONDS: Final = 0.5

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ServedPrediction(Prediction):
    """An estimate as a service gives it.

    Attributes:
        prediction_id: its id; give it back with what the job really took
            (:meth:`Client.observe`).
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
        gpu: its GPU model, with the MIG profile of a partition: ``A100/3g.20gb``.
        free_mib: memory free on it now; unless given it is taken to be empty.
    """

    id: Required[str]
    gpu: Required[str]
    free_mib: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions(PredictionOptions):
    """The options of a prediction by a service.

    Attributes:
        bins: ``bins_of_width`` of whole MiB; by default as in
            :class:`PredictionOptions`.
        fits: also decide what the job fits: ``True`` for the whole catalogue, or names such as
            ``A100`` and ``A100/3g.20gb``.
        devices: devices of the site that the job may fit, with their free memory.
    """

    fits: bool | Sequence[str] = False
    devices: Sequence[Device] | None = None

    def members(self) -> Document:
        """The members of the request's body."""
        fits = self.fits if isinstance(self.fits, bool) else list(self.fits)
        members = {
            "coverage": self.coverage,
            "bin_width_mib": _width_mib(self.bins),
            "gpu": self.gpu,
            "encoder": self.encoder,
            "fits": fits,
            "devices": self.devices and list(self.devices),
        }
        return _given(members)


def _given(members: Mapping[str, Any]) -> Document:
    """The options that differ from the service's defaults."""
    return {
        name: value for name, value in members.items() if value is not None and value is not False
    }


def _width_mib(bins: BinScheme | None) -> int | None:
    if bins is None:
        return None
    if bins.width_bytes % MIB or bins != bins_of_width(bins.width_bytes):
        raise InvalidRequestError(
            "must be bins_of_width(…) of whole MiB: the service knows no others",
            "bins",
        )
    return bins.width_bytes // MIB


def _prediction(document: Any) -> ServedPrediction:
    bins = document["bins"]
    probabilities = np.array(bins["probabilities"], dtype=np.float64)
    if probabilities.shape != (bins["count"],):
        raise ValueError("one probability per bin is expected")
    model = document["model"]
    return from_json(
        ServedPrediction,
        {
            **document,
            "probabilities": probabilities,
            "fits": document.get("fits") or (),
            "estimator": model["name"],
            "version": model["version"],
            "model_sha256": model["sha256"],
        },
    )


def _result(result: Mapping[str, Any]) -> ServedPrediction | ServiceError:
    if "prediction" in result:
        return _prediction(result["prediction"])
    problem = result["problem"]
    return ServiceError(problem["detail"], problem["status"], problem)


class Client:
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
        key = os.environ.get(API_KEY_VARIABLE) if api_key is None else api_key
        if key and not (key.isascii() and key.isprintable() and " " not in key):
            raise InvalidRequestError("must be printable ASCII without spaces", "api_key")
        check_installed("httpx", "client", "asking a service")
        import httpx

        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self.url = (url or os.environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/")
        self.timeout_seconds = timeout_seconds
        self._httpx = httpx
        self._http = httpx.Client(headers=headers, timeout=timeout_seconds)

    def predict(self, job: TrainingJob, **options: Any) -> ServedPrediction:
        """The prediction for one job.

        Args:
            job: the job.
            options: see :class:`RequestOptions`.

        Raises:
            InvalidRequestError: for bins that the service does not know.
            ServiceError: when the service cannot be reached in time, or refuses; ``problem`` then
                holds its document.
        """
        body = {"job": job_to_dict(job), **RequestOptions(**options).members()}
        return self._ask("/v1/predict", _prediction, body)

    def predict_many(
        self, jobs: Sequence[TrainingJob], **options: Any
    ) -> list[ServedPrediction | ServiceError]:
        """The prediction for each job, or its error, in order; options and errors as in
        :meth:`predict`."""

        def read(document: Any) -> list[ServedPrediction | ServiceError]:
            results = [_result(result) for result in document["results"]]
            if len(results) != len(jobs):
                raise ValueError("as many results as jobs are expected")
            return results

        members = RequestOptions(**options).members()
        body = {"jobs": [job_to_dict(job) for job in jobs], **members}
        return self._ask("/v1/predict/batch", read, body)

    def batch_sizes(self, job: TrainingJob, **options: Any) -> BatchSizes:
        """The largest batches that fit a GPU, and memory against batch size.

        Args:
            job: the job; its own batch size does not matter.
            options: ``gpu``, where the job is to run, such as ``A100`` or ``A100/3g.20gb``;
                ``free_mib``, memory free there now, that of an empty one unless given;
                ``coverage``, the share of jobs that stay below a limit; ``encoder``, ``mlp`` or
                ``transformer``; and ``max_batch``, the largest batch size to look at.

        Raises:
            ServiceError: as :meth:`predict`.
        """

        def read(document: Any) -> BatchSizes:
            return from_json(BatchSizes, {**document, "device": None})

        body = {"job": job_to_dict(job), **_given(options)}
        return self._ask("/v1/batch-sizes", read, body)

    def observe(self, **observed: Any) -> Document:
        """Tell the service what a job really took; returns its answer once that is stored.

        Args:
            observed: ``prediction_id``, the id of the prediction that the job was scheduled with, or
                else ``job`` and ``gpu``; ``source``, who measured, such as ``nvml_process`` or
                ``slurm_gpumem``; ``peak_bytes``, the most that it took; ``oom``, whether it ran out
                of memory: it needed more than the peak and the limit; ``limit_bytes``, the memory
                that it could have had; ``observed_at``, a datetime with its time zone; and ``idempotency_key``: the same observation sent
                again under the same key is stored once.

        Raises:
            ServiceError: as :meth:`predict`.
        """
        document = observed_document(observed)
        return self._ask("/v1/observations", lambda answer: {**answer}, document)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, path: str, read: Callable[[Any], T], body: Document) -> T:
        """What ``read`` makes of the answer's JSON; what it raises on a foreign document becomes a
        ServiceError."""
        try:
            response = self._http.post(self.url + path, content=json.dumps(body).encode())
        except (self._httpx.HTTPError, self._httpx.InvalidURL) as error:
            is_late = isinstance(error, self._httpx.TimeoutException)
            reason = (
                f"did not answer within {self.timeout_seconds:g} s"
                if is_late
                else f"cannot be reached: {str(error) or type(error).__name__}"
            )
            raise ServiceError(f"the service at {self.url} {reason}") from error
        status = response.status_code
        try:
            document = json.loads(response.content)
            if response.is_success:
                return read(document)
            message = f"the service at {self.url} refused: {document['detail']}"
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ServiceError(
                f"{self.url}{path} answered with status {status} and no document of this service: is the URL right?",
                status,
            ) from None
        raise ServiceError(message, status, document)
