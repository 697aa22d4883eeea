"""Answers in Arrow columns: what a chunk of jobs is told, and the rows that could not be answered with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gpumemnet.batch.chunks import Chunk
from gpumemnet.batch.options import Names, Question
from gpumemnet.errors import FieldError, InvalidJobError
from gpumemnet.job.job_batch import Indices
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.estimates import Part
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import MIB

if TYPE_CHECKING:
    import pyarrow as pa

REASONS_BETWEEN: Final = "; "


class Rejected(NamedTuple):
    """A row without an answer: its number in its file, the field that is wrong, and why."""

    row: int
    field: str
    reason: str


class Answered(NamedTuple):
    """What became of a chunk: a batch of :func:`answer_schema`, and the rows that were rejected, rising."""

    batch: pa.RecordBatch
    rejected: list[Rejected]


def answer_schema() -> pa.Schema:
    """The columns of the answers; amounts are whole MiB."""
    import pyarrow as pa

    name = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [
            pa.field("input", name, nullable=False),
            pa.field("row", pa.int64(), nullable=False),
            pa.field("job_id", pa.string()),
            pa.field("request_mib", pa.int64(), nullable=False),
            pa.field("limit_mib", pa.int64()),
            pa.field("bin", pa.int32(), nullable=False),
            pa.field("bin_lower_mib", pa.int64(), nullable=False),
            pa.field("bin_upper_mib", pa.int64()),
            pa.field("in_distribution", pa.bool_(), nullable=False),
            pa.field("reason", pa.string()),
            pa.field("gpu", name, nullable=False),
            pa.field("model", name, nullable=False),
            pa.field("model_sha256", name, nullable=False),
        ]
    )


def answer(predictor: Predictor, question: Question, names: Names, location: str, chunk: Chunk) -> Answered:
    """The answers for one chunk of the file at ``location``."""
    columns = _Columns(len(chunk.numbers), names)
    rejected: dict[int, FieldError] = {row: error for row, error in chunk.odd.items() if isinstance(error, FieldError)}
    jobs, rows = chunk.read.jobs, np.array(chunk.read.rows, dtype=np.int64)
    unanswered = predictor.unanswered(jobs, question.encoder)
    if unanswered:
        rejected |= {int(rows[at]): _refusal(predictor, jobs[at], question.encoder) for at in unanswered}
        left = np.setdiff1d(np.arange(len(jobs)), unanswered, assume_unique=True)
        jobs, rows = jobs.take(left), rows[left]
    columns.ask(predictor, question, jobs, rows)
    singles: dict[int, TrainingJob] = {}
    for row, job in chunk.odd.items():
        if isinstance(job, TrainingJob):
            try:
                predictor.models_for(job, question.encoder)
                singles[row] = job
            except FieldError as error:
                rejected[row] = error
    columns.ask(predictor, question, list(singles.values()), np.array(list(singles), dtype=np.int64))
    batch = columns.batch(chunk, location, sorted(rejected))
    numbers = chunk.numbers
    return Answered(batch, [Rejected(int(numbers[row]), rejected[row].field, rejected[row].reason) for row in sorted(rejected)])


def _refusal(predictor: Predictor, job: TrainingJob, encoder: str | None) -> FieldError:
    try:
        predictor.models_for(job, encoder)
    except FieldError as error:
        return error
    return InvalidJobError("has no model")


class _Columns:
    """Arrays over all rows of a chunk, filled by the models that answer."""

    def __init__(self, count: int, names: Names) -> None:
        self._names = names
        self._request, self._limit = np.zeros(count), np.zeros(count)
        self._bin, self._width = np.zeros(count, np.int32), np.ones(count, np.int64)
        self._is_last = np.zeros(count, np.bool_)
        self._model, self._gpu = np.zeros(count, np.int32), np.zeros(count, np.int32)
        self._reasons: dict[int, str] = {}

    def ask(self, predictor: Predictor, question: Question, jobs: Sequence[TrainingJob], rows: Indices) -> None:
        """Fill in what the models say of the jobs, which stand in ``rows`` of the chunk."""
        parts = predictor.parts(jobs, bins=question.bins, coverage=question.coverage, gpu=question.gpu, encoder=question.encoder)
        for part in parts:
            whole = len(part.rows) == len(jobs)
            self._fill(part, rows if whole else rows[np.array(part.rows, dtype=np.int64)])

    def _fill(self, part: Part, rows: Indices) -> None:
        estimates = part.estimates
        places: Any = slice(None) if len(rows) == len(self._request) else rows
        self._request[places] = estimates.expected_bytes
        self._limit[places] = estimates.safe_bytes
        indices = estimates.bin_indices
        self._bin[places] = indices
        self._width[places] = estimates.bins.width_bytes
        self._is_last[places] = indices == estimates.bins.count - 1
        self._model[places] = self._names.models.index(estimates.estimator)
        self._gpu[places] = self._names.gpus.index(estimates.gpu)
        for at, reasons in estimates.reasons.items():
            self._reasons[int(rows[at])] = REASONS_BETWEEN.join(reasons)

    def batch(self, chunk: Chunk, location: str, left_out: list[int]) -> pa.RecordBatch:
        """The columns without the rows ``left_out``."""
        import pyarrow as pa

        limit = np.ceil(self._limit / MIB)
        is_outside = np.isnan(limit)
        limit[is_outside] = 0.0
        lower = self._bin * self._width
        reason = pa.nulls(len(limit), pa.string())
        if self._reasons:
            reason = pa.array(list(map(self._reasons.get, range(len(limit)))), pa.string())
        names = self._names
        batch = pa.RecordBatch.from_arrays(
            [
                pa.DictionaryArray.from_arrays(pa.array(np.zeros(len(limit), np.int32)), pa.array([location])),
                pa.array(chunk.numbers),
                pa.nulls(len(limit), pa.string()) if chunk.identities is None else chunk.identities,
                pa.array(np.ceil(self._request / MIB).astype(np.int64)),
                pa.array(limit.astype(np.int64), mask=is_outside if is_outside.any() else None),
                pa.array(self._bin),
                pa.array(lower // MIB),
                pa.array((lower + self._width) // MIB, mask=self._is_last if self._is_last.any() else None),
                pa.array(~is_outside),
                reason,
                pa.DictionaryArray.from_arrays(pa.array(self._gpu), pa.array(names.gpus, pa.string())),
                pa.DictionaryArray.from_arrays(pa.array(self._model), pa.array(names.models, pa.string())),
                pa.DictionaryArray.from_arrays(pa.array(self._model), pa.array(names.hashes, pa.string())),
            ],
            schema=answer_schema(),
        )
        if not left_out:
            return batch
        keep = np.ones(len(limit), dtype=np.bool_)
        keep[left_out] = False
        return batch.filter(pa.array(keep))
