"""Predicts the jobs of one part: Arrow columns of answers, and the rejected rows with reasons."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gpumemnet.batch.parts import Part
from gpumemnet.errors import FieldError, InvalidRequestError, UnsupportedJobError
from gpumemnet.job.job_table import Indices
from gpumemnet.job.table_reader import Chunk, Reader
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.predict.prediction import PredictionOptions, PredictionTable
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import MIB

if TYPE_CHECKING:
    import pyarrow as pa

_REASONS_BETWEEN: Final = "; "


@dataclass(frozen=True, slots=True, kw_only=True)
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
    rejected: list[dict[str, Any]]


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


class PartPredictor:
    """The models and the reader of one process.

    Attributes:
        hash_of_model: name → hash of its bundle.
        gpu: name of the GPU that the answers are for.

    Raises:
        InvalidRequestError: when the GPU is unknown.
        BundleError: when a bundle cannot be loaded.
    """

    def __init__(self, options: BatchOptions) -> None:
        settings = {"context_bytes": options.context_bytes}
        self._predictor = (
            Predictor.load(*options.bundles, **settings)
            if options.bundles
            else Predictor.default(**settings)
        )
        self._options = options
        self._reader = Reader(options.id_column)
        self.hash_of_model = {each.card.name: each.sha256 for each in self._predictor.bundles}
        self.gpu = self._predictor.prediction_gpu(options.gpu).gpu

    def check_options(self) -> None:
        """Checks that at least one family has models for the options.

        Raises:
            InvalidRequestError: when none supports the coverage or the encoder.
        """
        options, refusal = self._options, None
        is_supported = False
        for family in FAMILIES:
            try:
                models = self._predictor.models_reaching(options.coverage, family, options.encoder)
            except UnsupportedJobError:
                continue
            except InvalidRequestError as error:  # another family may have the encoder
                refusal = refusal or error
                continue
            for model in models:
                model.level(options.coverage)
            is_supported = True
        if refusal is not None and not is_supported:
            raise refusal

    def predict(self, part: Part) -> Answers:
        """Predicts the rows of ``part``, chunk by chunk.

        Raises:
            DatasetError: when the file is damaged.
        """
        answers = Answers([], [])
        for chunk in self._reader.chunks(part.file, part.span):
            table, rows = chunk.read.table, chunk.read.rows
            errors: dict[int, FieldError] = dict(chunk.read.errors)
            refusals = self._predictor.refusals(table, self._options.encoder)
            if refusals:
                errors |= {int(rows[at]): error for at, error in refusals.items()}
                accepted = np.setdiff1d(np.arange(len(table)), list(refusals))
                table, rows = table.take(accepted), rows[accepted]
            predictions = self._predictor.predict_table(table, self._options)
            answers.batches.append(self._columns(part.file.location, chunk, rows, predictions))
            answers.rejected.extend(
                {
                    "input": part.file.location,
                    "row": int(chunk.numbers[row]),
                    "field": error.field,
                    "reason": error.reason,
                }
                for row, error in sorted(errors.items())
            )
        return answers

    def _columns(
        self, location: str, chunk: Chunk, rows: Indices, predictions: PredictionTable
    ) -> pa.RecordBatch:
        """The answers for ``rows``, the positions in the chunk of the predicted jobs."""
        import pyarrow as pa

        count, models = len(rows), predictions.models
        bin_index, model_index = predictions.bin_index, predictions.model_index

        def by_model(values: list[int]) -> Indices:
            return np.array(values, dtype=np.int64)[model_index]

        def repeated(words: list[str], places: Indices) -> pa.DictionaryArray:
            return pa.DictionaryArray.from_arrays(places.astype(np.int32), pa.array(words))

        names = list(self.hash_of_model)
        places = by_model([names.index(model.name) for model in models])
        nowhere = np.zeros(count, dtype=np.int64)
        widths = by_model([model.bins.width_bytes for model in models])
        is_last = bin_index == by_model([model.bins.count - 1 for model in models])
        limits = predictions.safe_bytes
        is_outside = np.ma.getmaskarray(limits)
        reasons = dict.fromkeys(range(count)) if count else {}
        for at in is_outside.nonzero()[0].tolist():
            reasons[at] = _REASONS_BETWEEN.join(predictions.reasons(at))
        return pa.RecordBatch.from_arrays(
            [
                repeated([location], nowhere),
                pa.array(chunk.numbers[rows]),
                pa.nulls(count, pa.string()) if chunk.ids is None else chunk.ids.take(rows),
                pa.array(_mib(predictions.expected_bytes)),
                pa.array(_mib(limits.filled(0)), mask=is_outside),
                pa.array(predictions.startup_peak_bytes),
                pa.array(bin_index.astype(np.int32)),
                pa.array(bin_index * widths),
                pa.array((bin_index + 1) * widths, mask=is_last),
                pa.array(~is_outside),
                pa.array(reasons.values(), pa.string()),
                repeated([self.gpu], nowhere),
                repeated(names, places),
                repeated(list(self.hash_of_model.values()), places),
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
        content: bytes = sink.getvalue().to_pybytes()
        return content
    lines = _csv_lines if output_format == "csv" else _json_lines
    return b"".join(lines(_without_dictionaries(batch)) for batch in batches if len(batch))


def _csv_lines(batch: pa.RecordBatch) -> bytes:
    from pyarrow import csv

    buffer = io.BytesIO()
    csv.write_csv(batch, buffer, csv.WriteOptions(include_header=False))
    return buffer.getvalue()


def _json_lines(batch: pa.RecordBatch) -> bytes:
    template = "{" + ", ".join(f"{json.dumps(name)}: %s" for name in batch.schema.names) + "}\n"
    columns = [_json_values(column.to_pylist()) for column in batch.columns]
    return "".join(map(template.__mod__, zip(*columns, strict=True))).encode()


def _json_values(values: list[Any]) -> list[str]:
    # Columns repeat values, and this encodes each once.
    text_of = {value: json.dumps(value, ensure_ascii=False) for value in set(values)}
    return [text_of[value] for value in values]


def _without_dictionaries(batch: pa.RecordBatch) -> pa.RecordBatch:
    import pyarrow as pa

    columns = [
        column.dictionary_decode() if isinstance(column, pa.DictionaryArray) else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, batch.schema.names)


def _mib(amounts: Indices) -> Indices:
    return np.ceil(amounts / MIB).astype(np.int64)
