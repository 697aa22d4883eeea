"""Processes one part: reads its chunks, predicts them, and stores the answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, TYPE_CHECKING

from gpumemnet.batch.answers import Answered, Rejected, answer, answer_schema
from gpumemnet.batch.options import BatchOptions, Names
from gpumemnet.batch.plan import Part
from gpumemnet.batch.scratch import Scratch, Tally
from gpumemnet.batch.text_formats import LINES
from gpumemnet.job.job_files import JobFile
from gpumemnet.job.reader import Reader, Span
from gpumemnet.predict.predictor import Predictor

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Work:
    """Settings that all parts of a batch share.

    Attributes:
        options: the options of the prediction.
        names: the strings that answers repeat.
        inputs: the input files.
        output_format: ``parquet``, ``csv`` or ``jsonl``.
    """

    options: BatchOptions
    names: Names
    inputs: tuple[JobFile, ...]
    output_format: str


def answer_part(
    work: Work, predictor: Predictor, reader: Reader, part: Part, on_rows: Callable[[int], None]
) -> list[Answered]:
    """Predicts the rows of ``part`` chunk by chunk; calls ``on_rows`` with the number of rows of
    each chunk.

    Raises:
        DatasetError: when the file is damaged.
    """
    file = work.inputs[part.file]
    answered = []
    for chunk in reader.chunks(file, Span(part.first_row, part.row_count, part.start)):
        answered.append(answer(predictor, work.options, work.names, file.location, chunk))
        on_rows(chunk.row_count)
    return answered


def keep_part(work: Work, scratch: Scratch, part: Part, answered: Sequence[Answered]) -> Tally:
    """Stores the answers of a part and returns its counts.

    Raises:
        DatasetError: when the answers cannot be written.
    """
    return keep_batches(
        work,
        scratch,
        part,
        [each.batch for each in answered],
        [row for each in answered for row in each.rejected],
    )


def keep_batches(
    work: Work,
    scratch: Scratch,
    part: Part,
    batches: Sequence[pa.RecordBatch],
    rejected: Sequence[Rejected],
) -> Tally:
    """Stores the answers of a part, given as record batches and rejected rows; otherwise like
    :func:`keep_part`."""
    tally = Tally(
        rows=part.row_count,
        answered=sum(len(batch) for batch in batches),
        outside=sum(len(batch) - batch.column("in_support").true_count for batch in batches),
        rejected=len(rejected),
    )
    write = (
        _write_arrow
        if work.output_format == "parquet"
        else partial(_write_lines, LINES[work.output_format])
    )
    scratch.keep(part, partial(write, batches), rejected, work.inputs[part.file].location, tally)
    return tally


def _write_arrow(batches: Sequence[pa.RecordBatch], stream: IO[bytes]) -> None:
    import pyarrow as pa

    with pa.ipc.new_file(stream, answer_schema()) as writer:
        for batch in batches:
            writer.write_batch(batch)


def _write_lines(
    lines: Callable[[pa.RecordBatch], bytes], batches: Sequence[pa.RecordBatch], stream: IO[bytes]
) -> None:
    for batch in batches:
        stream.write(lines(batch))
