"""Finds the largest batch that fits a GPU.

Predicted memory may fall slightly when the batch grows, which would confuse a scheduler that
searches.  The functions therefore use the running maximum over a dense grid of batch sizes.  With
more memory, the largest batch never shrinks.  With a larger batch, the memory does not either.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from gpumemnet.job.job_table import JobTable
from gpumemnet.job.training_job import MAX_BATCH_SIZE, TrainingJob
from gpumemnet.predict.gpu_fit import Memory, Target, memories_of
from gpumemnet.predict.prediction import PredictionOptions, PredictionTable

if TYPE_CHECKING:
    from gpumemnet.predict.predictor import Predictor

DEFAULT_MAX_BATCH: Final = 65_536
_FINE_STEPS: Final = 16
"""Grid steps per doubling of the batch size; the grid holds every batch size up to twice this
number."""
_LAYER_ROWS: Final = 50_000
"""Most layers that the grid up to the default may hold in all; jobs of many layers get fewer steps,
which bounds the work."""


@dataclass(frozen=True, kw_only=True)
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


_NOTHING: Final = BatchPoint(batch_size=0, request_mib=0, limit_mib=0)


@dataclass(frozen=True, kw_only=True)
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
        InvalidRequestError: as :meth:`gpumemnet.predict.predictor.Predictor.predict`.
        UnsupportedJobError: when no bundle is loaded for the job's family.
    """
    asked = PredictionOptions(gpu=target.gpu, **options)
    table = JobTable.from_jobs((replace(job, traced_peak_bytes=None),))

    def predicted(batches: Sequence[int]) -> PredictionTable:
        jobs = table.take(np.zeros(len(batches), dtype=np.int64))
        numbers = np.array(batches, np.float64)
        return predictor.predict_table(jobs.with_numbers("batch_size", numbers), asked)

    def points(batches: Sequence[int], start: BatchPoint) -> list[BatchPoint]:
        return _running_maximum(batches, memories_of(predicted(batches)), start)

    grid = batch_grid(max_batch, _steps(job))
    predictions = predicted(grid)
    curve = _running_maximum(grid, memories_of(predictions), _NOTHING)
    safe, likely = (
        _largest(curve, field, target.available_mib, points)
        for field in ("limit_mib", "request_mib")
    )
    reasons: tuple[str, ...] = ()
    if all(point.limit_mib is None for point in curve):
        reasons = min(map(predictions.reasons, range(len(grid))), key=len)
    return BatchSizes(
        **asdict(target),
        coverage=asked.coverage,
        max_batch=max_batch,
        safe_batch=safe,
        likely_batch=likely,
        reasons=reasons,
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


def _running_maximum(
    grid: Sequence[int], memories: Sequence[Memory], start: BatchPoint
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


def _largest(
    points: Sequence[BatchPoint],
    field: str,
    available_mib: int,
    between: Callable[[Sequence[int], BatchPoint], list[BatchPoint]],
) -> int | None:
    """The largest batch whose ``field`` fits; ``None`` if none does.

    The batch sizes that are tried between two neighbours depend on these alone, not on the available
    memory.  More memory therefore leads to the same two or to later ones, and never to a smaller
    batch.
    """

    def fits(point: BatchPoint) -> bool:
        amount = getattr(point, field)
        return amount is not None and amount <= available_mib

    while fitting := [index for index, point in enumerate(points) if fits(point)]:
        last, *after = points[fitting[-1] :]
        width = after[0].batch_size - last.batch_size if after else 0
        if width <= 1:
            return last.batch_size
        steps = {width * step // _FINE_STEPS for step in range(1, _FINE_STEPS)} - {0}
        batches = [last.batch_size + step for step in sorted(steps)]
        points = [last, *between(batches, last), after[0]]
    return None
