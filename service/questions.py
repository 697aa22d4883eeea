"""Reads the body of a request: which jobs are asked about, and how the answer is wanted.

Here is the envelope alone; the jobs in it are read by :func:`gpumemnet.job_json.job_from_dict`, the one parser of jobs.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpumemnet.bins import DEFAULT_TOP_BYTES, MAX_BINS, BinScheme, bins_of_width, named_bins
from gpumemnet.errors import InvalidJobError, InvalidRequestError
from gpumemnet.estimate import DEFAULT_COVERAGE
from gpumemnet.job import JOB_FIELDS
from gpumemnet.job_json import parse_json
from gpumemnet.layers import describe
from gpumemnet.units import MIB

MIN_BIN_WIDTH_MIB: Final = math.ceil(DEFAULT_TOP_BYTES / (MAX_BINS - 1) / MIB)
MAX_BIN_WIDTH_MIB: Final = DEFAULT_TOP_BYTES // MIB

OPTION_FIELDS: Final = ("coverage", "bin_width_mib", "bins")


@dataclass(frozen=True, slots=True)
class Options:
    """How the answer is wanted.

    Attributes:
        coverage: share of jobs that the safe bytes shall cover.
        bins: bin scheme of the probabilities; ``None`` for the model's own.
    """

    coverage: float
    bins: BinScheme | None


def read_question(body: bytes, content: str) -> tuple[Any, Options]:
    """What stands under ``content`` (``job`` or ``jobs``), unread, and the options beside it.

    Raises:
        InvalidRequestError: when the body is no JSON, or the envelope is wrong.
    """
    document = _envelope(body, content)
    return document[content], _options(document)


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


def _envelope(body: bytes, content: str) -> Mapping[str, Any]:
    known = (content, *OPTION_FIELDS)
    try:
        document = parse_json(body)
    except InvalidJobError as error:
        raise InvalidRequestError(error.reason, error.field or "body") from None
    if not isinstance(document, dict):
        raise InvalidRequestError(f"must be a JSON object with {', '.join(known)}, not {describe(document)}", "body")
    for name in document:
        if name not in known:
            raise InvalidRequestError(f"is not a field: {_hint(name, content, known)}", name[:64])
    if content not in document:
        raise InvalidRequestError(f"is missing: the body must be a JSON object with {', '.join(known)}", content)
    return document


def _hint(name: str, content: str, known: tuple[str, ...]) -> str:
    if name in JOB_FIELDS:
        return f"it belongs to a job, and jobs stand under '{content}'"
    close = difflib.get_close_matches(name[:64], known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known fields are {', '.join(known)}"


def _options(document: Mapping[str, Any]) -> Options:
    coverage, width_mib, name = (document.get(field) for field in OPTION_FIELDS)
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
    return Options(DEFAULT_COVERAGE if coverage is None else coverage, bins)
