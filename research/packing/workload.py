"""When which job of a trace arrives and how long it runs; what the trace does not say is drawn from
a seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import InvalidRequestError
from research.packing.reading import Trace, TraceRow

DURATION_SPREAD: Final = 1.0
"""Standard deviation of the logarithm of drawn durations: one job in six runs for more than 2.7
times the median."""
MAX_JOBS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """``J`` jobs in the order of their arrival.

    Attributes:
        rows: the different jobs of the trace.
        row_of: the row of each job, shape ``[J]``.
        arrival_seconds, duration_seconds: of each job, shape ``[J]``; the duration is that without
            neighbours.
        synthetic: what was drawn and is not in the trace, a sentence each.
    """

    rows: tuple[TraceRow, ...]
    row_of: NDArray[np.int64]
    arrival_seconds: NDArray[np.float64]
    duration_seconds: NDArray[np.float64]
    synthetic: tuple[str, ...]

    @property
    def peak_mib(self) -> NDArray[np.int64]:
        """True peak of each job, shape ``[J]``."""
        return np.array([row.peak_mib for row in self.rows], dtype=np.int64)[self.row_of]


def workload(
    trace: Trace,
    cards: int,
    *,
    jobs: int | None = None,
    load: float = 2.0,
    median_seconds: float = 3600.0,
    seed: int = 0,
) -> Workload:
    """The jobs of ``trace`` with their times.

    Args:
        trace: the rows; arrivals and durations are drawn where no row states them.
        cards: how many GPUs there will be.
        jobs: draw so many jobs from the rows, each row as often as the others; all rows once unless
            given.
        load: jobs per GPU that would run on average if none ever waited; sets the distance of drawn
            arrivals.
        median_seconds: median of drawn durations, which are log-normal.
        seed: of everything that is drawn.

    Raises:
        InvalidRequestError: on impossible numbers, rows of which only some state a time, or
            ``jobs`` beside stated arrivals.
    """
    _check(jobs, load, median_seconds, seed)
    rows = trace.rows
    has_arrivals, has_durations = (
        _stated(trace, name) for name in ("arrival_seconds", "duration_seconds")
    )
    draw = np.random.default_rng(seed)
    row_of = np.arange(len(rows))
    synthetic = []
    if jobs is not None:
        if has_arrivals:
            raise InvalidRequestError(
                "cannot be given: the trace states when its jobs arrived", "jobs"
            )
        rounds = -(-jobs // len(rows))
        row_of = np.concatenate([draw.permutation(len(rows)) for _ in range(rounds)])[:jobs]
        synthetic.append(f"{jobs:,} jobs drawn from {len(rows):,} rows")
    if has_durations:
        durations = np.array([row.duration_seconds for row in rows], dtype=np.float64)[row_of]
    else:
        durations = median_seconds * np.exp(DURATION_SPREAD * draw.standard_normal(len(row_of)))
        synthetic.append(
            f"durations drawn: log-normal, median {median_seconds:g} s, sigma {DURATION_SPREAD:g}"
        )
    if has_arrivals:
        arrivals = np.array([row.arrival_seconds for row in rows], dtype=np.float64)[row_of]
    else:
        arrivals = np.cumsum(draw.exponential(durations.mean() / (load * cards), len(row_of)))
        synthetic.append(f"arrivals drawn: Poisson, {load:g} jobs a GPU if none waited")
    order = np.argsort(arrivals, kind="stable")
    return Workload(
        rows=rows,
        row_of=row_of[order],
        arrival_seconds=arrivals[order] - arrivals.min(),
        duration_seconds=durations[order],
        synthetic=tuple(synthetic),
    )


def _check(jobs: int | None, load: float, median_seconds: float, seed: int) -> None:
    if jobs is not None and not 1 <= jobs <= MAX_JOBS:
        raise InvalidRequestError(f"must be from 1 to {MAX_JOBS:,}, not {jobs}", "jobs")
    if not 0.001 <= load <= 1000:
        raise InvalidRequestError(f"must be from 0.001 to 1000 jobs a GPU, not {load:g}", "load")
    if not 1 <= median_seconds <= 1e8:
        raise InvalidRequestError(
            f"must be from 1 to 100,000,000, not {median_seconds:g}", "median_seconds"
        )
    if not 0 <= seed < 2**63:
        raise InvalidRequestError(f"must be a whole number from 0, not {seed}", "seed")


def _stated(trace: Trace, name: str) -> bool:
    """Whether the rows state ``name``: all of them or none."""
    missing = next((row for row in trace.rows if getattr(row, name) is None), None)
    if missing is None:
        return True
    if any(getattr(row, name) is not None for row in trace.rows):
        raise InvalidRequestError(
            "is missing here and stated in other rows: state it in all of them or in none",
            f"{missing.location}, {name}",
        )
    return False
