"""Predicts the jobs of one part: Arrow columns of answers, and the rejected rows with reasons."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from gpumemnet.atomic_files import Document
from gpumemnet.batch.parts import Part
from gpumemnet.job.job_table import Indices
from gpumemnet.job.table_reader import Chunk, Reader
from gpumemnet.predict.prediction import PredictionOptions, PredictionTable
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import MIB

if TYPE_CHECKING:
    import pyarrow as pa

_REASONS_BETWEEN: Final = "; "


@dataclass(frozen=True, kw_only=True)
class BatchOptions(PredictionOptions):
    """The options of a batch: those of each prediction, and more.

    Attributes:
        bundles: folders of the bundles; empty for the shipped ones.
        context_bytes: see :class:`~gpumemnet.predict.predictor.Predictor`.
        id_column: column of the job ids; by default ``job_id`` or ``id``, if the file has one.
    """

    bundles: tuple[str, ...] = ()
    context_bytes: int | None = None
    id_column: str | None = None


class Answers(NamedTuple):
    """The answers for a part.

    Attributes:
        batches: record batches with the schema of :func:`answer_schema`.
        rejected: rows without an answer: input, row, field and reason.
    """

    batches: list[pa.RecordBatch]
    rejected: list[Document]


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
            pa.field("startup_peak_bytes", pa.int64()),
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


class PartPredictor:
    """The models and the reader of one process.

    Attributes:
        hash_of_model: name → hash of its bundle.
        gpu: name of the GPU that the answers are for.

    Raises:
        InvalidRequestError: when the GPU is unknown, or no model has the encoder and the coverage.
        BundleError: when a bundle cannot be loaded.
    """

    def __init__(self, options: BatchOptions) -> None:
        self._predictor = Predictor.load(*options.bundles, context_bytes=options.context_bytes)
        self._options = options
        self._reader = Reader(options.id_column)
        self.hash_of_model = {each.card.name: each.sha256 for each in self._predictor.bundles}
        self.gpu = self._predictor.prediction_gpu(options.gpu).gpu
        self._predictor.model(options.encoder).level(options.coverage)  # the errors of both

    def predict(self, part: Part) -> Answers:
        """Predicts the rows of ``part``, chunk by chunk.

        Raises:
            DatasetError: when the file is damaged.
        """
        answers = Answers([], [])
        for chunk in self._reader.chunks(part.file, part.span):
            read = self._predictor.accepted(chunk.read, self._options.encoder)
            predictions = self._predictor.predict_table(read.table, self._options)
            answers.batches.append(self._columns(part.file.location, chunk, read.rows, predictions))
            answers.rejected.extend(
                {
                    "input": part.file.location,
                    "row": int(chunk.numbers[row]),
                    "field": error.field,
                    "reason": error.reason,
                }
                for row, error in sorted(read.errors.items())
            )
        return answers

    def _columns(
        self, location: str, chunk: Chunk, rows: Indices, predictions: PredictionTable
    ) -> pa.RecordBatch:
        """The answers for ``rows``, the positions in the chunk of the predicted jobs."""
        import pyarrow as pa

        count, model, bin_index = len(rows), predictions.model, predictions.bin_index

        def repeated(word: str) -> pa.DictionaryArray:
            return pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), pa.array([word]))

        width = model.bins.width_bytes
        limits, is_inside = predictions.safe_bytes, predictions.in_support
        reasons: dict[int, str | None] = dict.fromkeys(range(count))
        for at in (~is_inside).nonzero()[0].tolist():
            reasons[at] = _REASONS_BETWEEN.join(predictions.reasons(at))
        return pa.RecordBatch.from_arrays(
            [
                repeated(location),
                pa.array(chunk.numbers[rows]),
                pa.nulls(count, pa.string()) if chunk.ids is None else chunk.ids.take(rows),
                pa.array(_mib(predictions.expected_bytes)),
                pa.array(_mib(limits.filled(0)), mask=np.ma.getmaskarray(limits)),
                pa.array(predictions.expected_bytes, mask=predictions.searches),
                pa.array(bin_index.astype(np.int32)),
                pa.array(bin_index * width),
                pa.array((bin_index + 1) * width, mask=bin_index == model.bins.count - 1),
                pa.array(is_inside),
                pa.array(reasons.values(), pa.string()),
                repeated(self.gpu),
                repeated(model.name),
                repeated(self.hash_of_model[model.name]),
            ],
            schema=answer_schema(),
        )


def encode(batches: list[pa.RecordBatch], output_format: str) -> bytes:
    """The answers as Arrow's stream for ``parquet``, else as lines of ``csv`` (without a header) or
    ``jsonl``."""
    import pyarrow as pa

    if output_format == "parquet":
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, answer_schema()) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return sink.getvalue().to_pybytes()
    lines = _csv_lines if output_format == "csv" else _json_lines
    return b"".join(lines(_without_dictionaries(batch)) for batch in batches if len(batch))


def _csv_lines(batch: pa.RecordBatch) -> bytes:
    from pyarrow import csv

    buffer = io.BytesIO()
    csv.write_csv(batch, buffer, csv.WriteOptions(include_header=False))
    return buffer.getvalue()


def _json_lines(batch: pa.RecordBatch) -> bytes:
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in batch.to_pylist())
    return "".join(lines).encode()


def _without_dictionaries(batch: pa.RecordBatch) -> pa.RecordBatch:
    import pyarrow as pa

    columns = [
        column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _mib(amounts: Indices) -> Indices:
    return np.ceil(amounts / MIB).astype(np.int64)
