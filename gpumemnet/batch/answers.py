"""Writes the answers for a chunk of jobs as Arrow columns, and lists the rejected rows with
reasons."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from gpumemnet.batch.options import BatchOptions, Names
from gpumemnet.job.job_table import Indices
from gpumemnet.job.reader import Chunk
from gpumemnet.predict.prediction import PredictionTable
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import MIB

if TYPE_CHECKING:
    import pyarrow as pa

REASONS_BETWEEN: Final = "; "


class Rejected(NamedTuple):
    """A row without an answer: its number in its file, the wrong field, and the reason."""

    row: int
    field: str
    reason: str


class Answered(NamedTuple):
    """Result of a chunk: a record batch with the schema of :func:`answer_schema`, and the rejected
    rows in order."""

    batch: pa.RecordBatch
    rejected: list[Rejected]


def answer_schema() -> pa.Schema:
    """The columns of the answers, with the names of
    :meth:`~gpumemnet.predict.prediction.PredictionTable.documents`."""
    import pyarrow as pa

    name = pa.dictionary(pa.int32(), pa.string())
    return pa.schema(
        [
            pa.field("input", name, nullable=False),
            pa.field("row", pa.int64(), nullable=False),
            pa.field("job_id", pa.string()),
            pa.field("request_mib", pa.int64(), nullable=False),
            pa.field("limit_mib", pa.int64()),
            pa.field("startup_peak_bytes", pa.int64(), nullable=False),
            pa.field("bin_index", pa.int32(), nullable=False),
            pa.field("bin_lower_bytes", pa.int64(), nullable=False),
            pa.field("bin_upper_bytes", pa.int64()),
            pa.field("in_support", pa.bool_(), nullable=False),
            pa.field("reasons", pa.string()),
            pa.field("gpu", name, nullable=False),
            pa.field("model", name, nullable=False),
            pa.field("model_sha256", name, nullable=False),
        ]
    )


def answer(
    predictor: Predictor, options: BatchOptions, names: Names, location: str, chunk: Chunk
) -> Answered:
    """Predicts one chunk of the file at ``location``."""
    columns = _Columns(len(chunk.numbers), names)
    rejected = dict(chunk.read.errors)
    table, rows = chunk.read.table, chunk.read.rows
    refusals = predictor.refusals(table, options.encoder)
    if refusals:
        rejected |= {int(rows[at]): error for at, error in refusals.items()}
        left = np.setdiff1d(np.arange(len(table)), list(refusals), assume_unique=True)
        table, rows = table.take(left), rows[left]
    columns.fill(
        rows,
        predictor.predict_table(
            table,
            bins=options.bins,
            coverage=options.coverage,
            gpu=options.gpu,
            encoder=options.encoder,
        ),
    )
    batch = columns.batch(chunk, location, sorted(rejected))
    numbers = chunk.numbers
    return Answered(
        batch,
        [
            Rejected(int(numbers[row]), rejected[row].field, rejected[row].reason)
            for row in sorted(rejected)
        ],
    )


class _Columns:
    """Arrays over all rows of a chunk, to be filled with predictions."""

    def __init__(self, count: int, names: Names) -> None:
        self._names = names
        self._request, self._startup, self._limit = np.zeros((3, count), np.int64)
        self._is_outside = np.zeros(count, np.bool_)
        self._bin, self._width = np.zeros(count, np.int32), np.ones(count, np.int64)
        self._is_last = np.zeros(count, np.bool_)
        self._model = np.zeros(count, np.int32)
        self._reasons: dict[int, str] = {}

    def fill(self, rows: Indices, predictions: PredictionTable) -> None:
        """Stores the predictions of the jobs in ``rows``."""
        self._request[rows] = predictions.expected_bytes
        self._startup[rows] = predictions.startup_peak_bytes
        limits = predictions.safe_bytes
        self._limit[rows] = limits.filled(0)
        self._is_outside[rows] = limits.mask
        index, answered_by = predictions.bin_index, predictions.model_index
        self._bin[rows] = index
        for name, values in (
            (self._width, [model.bins.width_bytes for model in predictions.models]),
            (self._model, [self._names.models.index(model.name) for model in predictions.models]),
        ):
            name[rows] = np.array(values, dtype=np.int64)[answered_by]
        last = np.array([model.bins.count - 1 for model in predictions.models], dtype=np.int64)
        self._is_last[rows] = index == last[answered_by]
        for at in np.flatnonzero(limits.mask).tolist():
            self._reasons[int(rows[at])] = REASONS_BETWEEN.join(predictions.reasons(at))

    def batch(self, chunk: Chunk, location: str, left_out: list[int]) -> pa.RecordBatch:
        """Builds the record batch without the rows ``left_out``."""
        import pyarrow as pa

        limit, is_outside = np.ceil(self._limit / MIB), self._is_outside
        lower = self._bin * self._width
        reason = pa.nulls(len(limit), pa.string())
        if self._reasons:
            reason = pa.array(list(map(self._reasons.get, range(len(limit)))), pa.string())
        names = self._names
        batch = pa.RecordBatch.from_arrays(
            [
                pa.DictionaryArray.from_arrays(
                    pa.array(np.zeros(len(limit), np.int32)), pa.array([location])
                ),
                pa.array(chunk.numbers),
                pa.nulls(len(limit), pa.string()) if chunk.ids is None else chunk.ids,
                pa.array(np.ceil(self._request / MIB).astype(np.int64)),
                pa.array(limit.astype(np.int64), mask=is_outside if is_outside.any() else None),
                pa.array(self._startup),
                pa.array(self._bin),
                pa.array(lower),
                pa.array(lower + self._width, mask=self._is_last if self._is_last.any() else None),
                pa.array(~is_outside),
                reason,
                pa.DictionaryArray.from_arrays(
                    pa.array(np.zeros(len(self._model), np.int32)),
                    pa.array([names.gpu], pa.string()),
                ),
                pa.DictionaryArray.from_arrays(
                    pa.array(self._model), pa.array(names.models, pa.string())
                ),
                pa.DictionaryArray.from_arrays(
                    pa.array(self._model), pa.array(names.hashes, pa.string())
                ),
            ],
            schema=answer_schema(),
        )
        if not left_out:
            return batch
        keep = np.ones(len(limit), dtype=np.bool_)
        keep[left_out] = False
        return batch.filter(pa.array(keep))
