"""Reads the bodies of requests: which jobs are asked about, and how the answer is wanted.

Here is the envelope alone; the jobs in it are read by :func:`gpumemnet.job.json_codec.job_from_dict`, or alike by quicker
readers.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpumemnet.errors import InvalidJobError, InvalidRequestError
from gpumemnet.gpu.fits import Target, catalogue_targets, target
from gpumemnet.job.json_codec import parse_json
from gpumemnet.job.layers import describe
from gpumemnet.job.training_job import JOB_FIELDS
from gpumemnet.predict.bins import DEFAULT_TOP_BYTES, MAX_BINS, BinScheme, bins_of_width, named_bins
from gpumemnet.predict.bundle import ENCODERS
from gpumemnet.predict.largest_batch import DEFAULT_MAX_BATCH
from gpumemnet.predict.prediction import DEFAULT_COVERAGE
from gpumemnet.units import MIB

MIN_BIN_WIDTH_MIB: Final = math.ceil(DEFAULT_TOP_BYTES / (MAX_BINS - 1) / MIB)
MAX_BIN_WIDTH_MIB: Final = DEFAULT_TOP_BYTES // MIB

OPTION_FIELDS: Final = ("coverage", "bin_width_mib", "bins", "gpu", "encoder", "fits", "devices")
BATCH_SIZES_FIELDS: Final = ("coverage", "encoder", "gpu", "mig", "free_mib", "max_batch")
SMALLEST_GPU_FIELDS: Final = ("coverage", "encoder", "gpus", "devices")
DEVICE_FIELDS: Final = ("id", "gpu", "mig", "free_mib")

MAX_TARGETS: Final = 256
"""Most names in ``fits`` or ``gpus``, and most devices, in one request."""
MAX_ASKED_BATCH: Final = 2**20
"""Largest ``max_batch``: more would cost time, and no job takes so many samples at once."""


@dataclass(frozen=True, slots=True)
class Options:
    """How the answer is wanted.

    Attributes:
        coverage: share of jobs that the safe bytes shall cover.
        bins: bin scheme of the probabilities; ``None`` for the model's own.
        gpu: GPU to answer for; ``None`` for the one that the model learnt from.
        encoder: which classifier; ``None`` for the predictor's choice.
        targets: what the job may fit; ``None`` where that is not asked.
    """

    coverage: float = DEFAULT_COVERAGE
    bins: BinScheme | None = None
    gpu: str | None = None
    encoder: str | None = None
    targets: tuple[Target, ...] | None = None


@dataclass(frozen=True, slots=True)
class BatchSizesQuestion:
    """A question for the largest batch.

    Attributes:
        job: the job's document, unread.
        coverage, encoder: as :class:`Options` has them.
        gpu, mig, free_mib: where the job is to run; ``None`` each where not given.
        max_batch: the largest batch size to look at.
    """

    job: Any
    coverage: float
    encoder: str | None
    gpu: str | None
    mig: str | None
    free_mib: int | None
    max_batch: int


PLAIN_OPTIONS: Final = Options()
"""Those of a question that states none."""


def read_question(body: bytes, content: str) -> tuple[Any, Options]:
    """What stands under ``content`` (``job`` or ``jobs``), unread, and the options beside it.

    Raises:
        InvalidRequestError: when the body is no JSON, or the envelope is wrong.
    """
    document = _envelope(body, content, OPTION_FIELDS)
    return document[content], PLAIN_OPTIONS if len(document) == 1 else read_options(document)


def read_batch_sizes(body: bytes) -> BatchSizesQuestion:
    """The question of ``POST /v1/batch-sizes``.

    Raises:
        InvalidRequestError: as :func:`read_question`.
    """
    document = _envelope(body, "job", BATCH_SIZES_FIELDS)
    coverage, encoder, gpu, mig, free_mib, max_batch = (document.get(field) for field in BATCH_SIZES_FIELDS)
    if max_batch is not None and (type(max_batch) is not int or not 1 <= max_batch <= MAX_ASKED_BATCH):
        raise InvalidRequestError(
            f"must be a whole number between 1 and {MAX_ASKED_BATCH}, not {describe(max_batch)}", "max_batch"
        )
    if gpu is None and mig is not None:
        raise InvalidRequestError("is a part of a GPU: name that as 'gpu'", "mig")
    return BatchSizesQuestion(
        job=document["job"],
        coverage=DEFAULT_COVERAGE if coverage is None else coverage,
        encoder=_encoder(encoder),
        gpu=_gpu(gpu),
        mig=mig,
        free_mib=free_mib,
        max_batch=DEFAULT_MAX_BATCH if max_batch is None else max_batch,
    )


def read_smallest_gpu(body: bytes) -> tuple[Any, Options]:
    """The job of ``POST /v1/smallest-gpu``, unread, and among the options the GPUs to choose from.

    Raises:
        InvalidRequestError: as :func:`read_question`.
    """
    document = _envelope(body, "job", SMALLEST_GPU_FIELDS)
    coverage, encoder, gpus, devices = (document.get(field) for field in SMALLEST_GPU_FIELDS)
    return document["job"], Options(
        coverage=DEFAULT_COVERAGE if coverage is None else coverage,
        encoder=_encoder(encoder),
        targets=None if gpus is None and devices is None else _named_targets(gpus, "gpus") + _devices(devices),
    )


def check_jobs(jobs: Any, max_jobs: int) -> list[Any]:
    """``jobs`` if it is a list of at most ``max_jobs``.

    Raises:
        InvalidRequestError: otherwise.
    """
    if not isinstance(jobs, list):
        raise InvalidRequestError(f"must be a list of jobs, not {describe(jobs)}", "jobs")
    if len(jobs) > max_jobs:
        raise InvalidRequestError(f"must hold at most {max_jobs} jobs, not {len(jobs)}: send them in several requests", "jobs")
    return jobs


def _envelope(body: bytes, content: str, options: tuple[str, ...]) -> Mapping[str, Any]:
    try:
        document = parse_json(body)
    except InvalidJobError as error:
        raise InvalidRequestError(error.reason, error.field or "body") from None
    if not isinstance(document, dict):
        raise InvalidRequestError(f"must be a JSON object with {_listed(content, options)}, not {describe(document)}", "body")
    for name in document:
        if name != content and name not in options:
            raise InvalidRequestError(f"is not a field: {_hint(name, content, options)}", name[:64])
    if content not in document:
        raise InvalidRequestError(f"is missing: the body must be a JSON object with {_listed(content, options)}", content)
    return document


def _listed(content: str, options: tuple[str, ...]) -> str:
    return ", ".join((content, *options))


def _hint(name: str, content: str, options: tuple[str, ...]) -> str:
    if name in JOB_FIELDS:
        return f"it belongs to a job, and jobs stand under '{content}'"
    close = difflib.get_close_matches(name[:64], (content, *options), n=1)
    return f"did you mean '{close[0]}'?" if close else f"known fields are {_listed(content, options)}"


def read_options(document: Mapping[str, Any]) -> Options:
    """The options among the members of a request.

    Raises:
        InvalidRequestError: when one is not what it may be.
    """
    coverage, width_mib, name, gpu, encoder, fits, devices = (document.get(field) for field in OPTION_FIELDS)
    if name is not None and width_mib is not None:
        raise InvalidRequestError("must not stand beside bin_width_mib: give one of them", "bins")
    bins = None
    if name is not None:
        bins = named_bins(name)
    elif width_mib is not None:
        if type(width_mib) is not int or not MIN_BIN_WIDTH_MIB <= width_mib <= MAX_BIN_WIDTH_MIB:
            raise InvalidRequestError(
                f"must be a whole number of MiB between {MIN_BIN_WIDTH_MIB} and {MAX_BIN_WIDTH_MIB}, not {describe(width_mib)}",
                "bin_width_mib",
            )
        bins = bins_of_width(width_mib * MIB)
    is_asked = devices is not None or not (fits is None or fits is False)
    targets = _fits(fits) + _devices(devices) if is_asked else None
    return Options(DEFAULT_COVERAGE if coverage is None else coverage, bins, _gpu(gpu), _encoder(encoder), targets)


def _gpu(gpu: Any) -> str | None:
    if gpu is not None and not isinstance(gpu, str):
        raise InvalidRequestError(f"must be the name of a GPU, not {describe(gpu)}", "gpu")
    return gpu


def _encoder(encoder: Any) -> str | None:
    if encoder is not None and (not isinstance(encoder, str) or encoder not in ENCODERS):
        raise InvalidRequestError(f"must be one of {', '.join(ENCODERS)}, not {describe(encoder)}", "encoder")
    return encoder


def _fits(fits: Any) -> tuple[Target, ...]:
    if fits is None or fits is False:
        return ()
    if fits is True:
        return catalogue_targets()
    return _named_targets(fits, "fits")


def _named_targets(names: Any, field: str) -> tuple[Target, ...]:
    targets = []
    for index, name in enumerate(_checked_list(names, field, "names of GPUs such as A100 or A100/3g.20gb")):
        try:
            targets.append(target(name))
        except InvalidRequestError as error:
            raise InvalidRequestError(error.reason, f"{field}[{index}]") from None
    return tuple(targets)


def _devices(devices: Any) -> tuple[Target, ...]:
    targets = []
    for index, device in enumerate(_checked_list(devices, "devices", f"objects with {', '.join(DEVICE_FIELDS)}")):
        place = f"devices[{index}]"
        if not isinstance(device, dict):
            raise InvalidRequestError(f"must be an object with {', '.join(DEVICE_FIELDS)}, not {describe(device)}", place)
        for name in device:
            if name not in DEVICE_FIELDS:
                raise InvalidRequestError(f"is not a field: known fields are {', '.join(DEVICE_FIELDS)}", f"{place}.{name[:64]}")
        for name in ("id", "gpu"):
            if device.get(name) is None:
                raise InvalidRequestError("is missing", f"{place}.{name}")
        try:
            targets.append(target(device["gpu"], mig=device.get("mig"), free_mib=device.get("free_mib"), device=device["id"]))
        except InvalidRequestError as error:
            raise InvalidRequestError(error.reason, f"{place}.{error.field}") from None
    return tuple(targets)


def _checked_list(values: Any, field: str, wanted: str) -> list[Any]:
    if values is None:
        return []
    if not isinstance(values, list):
        raise InvalidRequestError(f"must be a list of {wanted}, not {describe(values)}", field)
    if len(values) > MAX_TARGETS:
        raise InvalidRequestError(f"must hold at most {MAX_TARGETS}, not {len(values)}: ask in several requests", field)
    return values
