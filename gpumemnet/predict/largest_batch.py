"""Finds the largest batch that fits a GPU.

Predicted memory may fall slightly when the batch grows, which would confuse a scheduler that
searches.  The functions therefore use the running maximum over a dense grid of batch sizes.  With
more memory, the largest batch never shrinks.  With a larger batch, the memory does not either.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import describe
from gpumemnet.job.training_job import MAX_BATCH_SIZE, TrainingJob
from gpumemnet.predict.gpu_fit import Memory, Target, memories_of
from gpumemnet.predict.prediction import PredictionOptions

if TYPE_CHECKING:
    from gpumemnet.predict.predictor import Predictor

DEFAULT_MAX_BATCH: Final = 65_536
_FINE_STEPS: Final = 16
"""Grid steps per doubling of the batch size; the grid holds every batch size up to twice this
number."""
_LAYER_ROWS: Final = 50_000
"""Most layers that the grid up to the default may hold in all; jobs of many layers get fewer steps,
which bounds the work."""

_NOTHING: Final = Memory(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPoint:
    """Memory at one batch size: the maximum over this and all smaller batch sizes on the grid.

    Attributes:
        batch_size: the batch size.
        request_mib: expected memory in MiB, rounded up.
        limit_mib: safe memory in MiB, rounded up; ``None`` outside the model's support.
    """

    batch_size: int
    request_mib: int
    limit_mib: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes(Target):
    """The largest batches that fit one target.

    Attributes:
        coverage: share of jobs that stay below the limit.
        max_batch: the largest batch size considered.
        safe_batch: the largest batch whose limit fits; ``None`` when no limit fits or there is no
            limit.
        likely_batch: the largest batch whose request fits; ``None`` when none does.
        reasons: why no batch size has a limit; empty when one has.
        curve: memory against batch size from 1 to ``max_batch``, never falling.
    """

    coverage: float
    max_batch: int
    safe_batch: int | None
    likely_batch: int | None
    reasons: tuple[str, ...]
    curve: tuple[BatchPoint, ...]


def batch_sizes(
    predictor: Predictor,
    job: TrainingJob,
    target: Target,
    *,
    max_batch: int = DEFAULT_MAX_BATCH,
    **options: Any,
) -> BatchSizes:
    """Finds the largest batches of ``job`` that fit ``target``; the batch size of the job itself is
    ignored.

    A traced peak holds for one batch size only and is ignored too.

    Args:
        predictor: the predictor.
        job: the job.
        target: the GPU or partition that it is to run on.
        max_batch: the largest batch size to consider.
        options: ``coverage`` and ``encoder``, see
            :class:`~gpumemnet.predict.prediction.PredictionOptions`.

    Raises:
        InvalidRequestError: on an impossible ``max_batch``, and as
            :meth:`gpumemnet.predict.predictor.Predictor.predict`.
        UnsupportedJobError: when no bundle is loaded for the job's family.
    """
    if type(max_batch) is not int or not 1 <= max_batch <= MAX_BATCH_SIZE:
        raise InvalidRequestError(
            f"must be a whole number between 1 and {MAX_BATCH_SIZE}, not {describe(max_batch)}",
            "max_batch",
        )
    asked = PredictionOptions(gpu=target.gpu, **options)
    memory_of = _MemoryOfBatches(predictor, job, asked)
    grid = batch_grid(max_batch, _steps(job))
    curve = _running_maximum(grid, memory_of(grid))
    reasons = memory_of.fewest_reasons
    safe = _Bracket(curve, "limit_mib", target.available_mib, max_batch)
    likely = _Bracket(curve, "request_mib", target.available_mib, max_batch)
    while batches := sorted({*safe.open_batches(), *likely.open_batches()}):
        known = dict(zip(batches, memory_of(batches), strict=True))
        safe.narrow(known)
        likely.narrow(known)
    return BatchSizes(
        **asdict(target),
        coverage=asked.coverage,
        max_batch=max_batch,
        safe_batch=safe.largest,
        likely_batch=likely.largest,
        reasons=reasons if all(point.limit_mib is None for point in curve) else (),
        curve=tuple(curve),
    )


def batch_grid(max_batch: int, steps: int = _FINE_STEPS) -> list[int]:
    """Batch sizes from 1 to ``max_batch``: every one up to twice ``steps``, then ``steps`` per
    doubling.

    Args:
        max_batch: the last batch size.
        steps: steps per doubling, a power of two.
    """
    points = _grid(steps)
    return [*points[: bisect_left(points, max_batch)], max_batch]


@lru_cache(maxsize=8)
def _grid(steps: int) -> tuple[int, ...]:
    points = [*range(1, steps + 1)]
    while points[-1] < MAX_BATCH_SIZE:
        first = points[-1]
        points += [first + first * step // steps for step in range(1, steps + 1)]
    return tuple(min(point, MAX_BATCH_SIZE) for point in points)


def _steps(job: TrainingJob) -> int:
    """Grid steps for a job; they do not depend on its batch size, so that answers for two batch
    sizes are comparable."""
    steps = _FINE_STEPS
    while steps > 1 and len(job.layers) * steps * DEFAULT_MAX_BATCH.bit_length() > _LAYER_ROWS:
        steps //= 2
    return steps


class _MemoryOfBatches:
    """The memory of one job on one GPU at any batch size; many batch sizes are predicted as one
    table."""

    def __init__(self, predictor: Predictor, job: TrainingJob, options: PredictionOptions) -> None:
        self._predictor = predictor
        self._table = JobTable.from_jobs((replace(job, traced_peak_bytes=None),))
        self._options = options
        self.fewest_reasons: tuple[str, ...] = ()

    def __call__(self, batches: Sequence[int]) -> list[Memory]:
        jobs = self._table.take(np.zeros(len(batches), dtype=np.int64)).with_numbers(
            "batch_size", np.array(batches, np.float64)
        )
        predictions = self._predictor.predict_table(jobs, self._options)
        self.fewest_reasons = min(map(predictions.reasons, range(len(jobs))), key=len)
        return memories_of(predictions)


def _running_maximum(
    grid: Sequence[int], memories: Sequence[Memory], start: Memory = _NOTHING
) -> list[BatchPoint]:
    """Running maximum of request and limit; a limit is at least the request, and stays missing
    where there was none."""
    request, limit = start.request_mib, start.limit_mib or 0
    points = []
    for batch, memory in zip(grid, memories, strict=True):
        request = max(request, memory.request_mib)
        if memory.limit_mib is not None:
            limit = max(limit, request, memory.limit_mib)
        points.append(
            BatchPoint(
                batch_size=batch,
                request_mib=request,
                limit_mib=None if memory.limit_mib is None else limit,
            )
        )
    return points


class _Bracket:
    """Searches for the largest batch that fits, between two neighbours on the grid.

    The batch sizes that it tries depend on the bracket alone, not on the available memory.  More
    memory therefore leads to the same bracket or to a later one, and never to a smaller batch.
    """

    def __init__(
        self, curve: Sequence[BatchPoint], field: str, available_mib: int, max_batch: int
    ) -> None:
        self._field = field
        self._available_mib = available_mib
        self.largest: int | None = None
        self._below = _NOTHING
        self._end = max_batch
        self._take(curve, max_batch)

    def open_batches(self) -> list[int]:
        """The batch sizes to try next; empty when the search is finished."""
        if self.largest is None or self._end - self.largest <= 1:
            return []
        width = self._end - self.largest
        return sorted(
            {self.largest + width * step // _FINE_STEPS for step in range(1, _FINE_STEPS)}
            - {self.largest}
        )

    def narrow(self, known: dict[int, Memory]) -> None:
        """Narrows the bracket with the memory at the batch sizes that were tried."""
        batches = self.open_batches()
        if batches:
            self._take(
                _running_maximum(batches, [known[batch] for batch in batches], self._below),
                self._end,
            )

    def _take(self, points: Sequence[BatchPoint], end: int) -> None:
        fitting = [
            index
            for index, point in enumerate(points)
            if (amount := getattr(point, self._field)) is not None and amount <= self._available_mib
        ]
        if fitting:
            last = points[fitting[-1]]
            self.largest = last.batch_size
            limits = [
                point.limit_mib
                for point in points[: fitting[-1] + 1]
                if point.limit_mib is not None
            ]
            self._below = Memory(last.request_mib, max(limits, default=self._below.limit_mib or 0))
            after = fitting[-1] + 1
        else:
            after = 0
        self._end = points[after].batch_size if after < len(points) else end
