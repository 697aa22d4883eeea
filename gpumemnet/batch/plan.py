"""Cuts files into parts, the units of work: what one process answers in one go, and what a killed run need not do again.

A part is a run of whole chunks.  Rows of Parquet are found by their row groups; lines by their place in the file, which a quick
reading ahead of the work finds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np

from gpumemnet.batch.inputs import InputFile
from gpumemnet.batch.opening import csv_header, open_parquet, reading
from gpumemnet.data.dataset import DATASET_VERSION, VERSION_KEY
from gpumemnet.errors import DatasetError
from gpumemnet.job.arrow_codec import check_columns

CHUNK_ROWS: Final = 4096
"""Rows that go through the models together, counted from the first of their file.  The last bits of transformer-based models'
answers depend on it."""
PART_ROWS: Final = 64 * CHUNK_ROWS
"""At most so many rows make a part."""
_WIDE_PART_ROWS: Final = 8 * CHUNK_ROWS
_WIDE_ROW_BYTES: Final = 64
"""Rows of more bytes than these hold layers, and take ten times as long; lines do in any case."""
_LEAST_PARTS: Final = 16
"""So many parts at least, where there are chunks enough, so that all processes have work to the end."""
MAX_LINE_BYTES: Final = 64 * 2**20
_BLOCK_BYTES: Final = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a file, from the start of a chunk.

    Attributes:
        file: position of the file among the inputs.
        first_row: rows of the file before it; for lines, lines, the header of a CSV file left out.
        row_count: rows, or lines.
        start, stop: bytes of the file that hold them, where it is one of lines.
        run: parts of a file with the same one follow each other in its one row group: best read by one process.
    """

    file: int
    first_row: int
    row_count: int
    start: int = 0
    stop: int = 0
    run: int = 0

    @property
    def name(self) -> str:
        """What the finished part is kept under."""
        return f"{self.file:05d}-{self.first_row:014d}"


def check_input(file: InputFile) -> list[int] | None:
    """Look at a file before the work begins; returns the rows of each row group, where there are any, as of Parquet.

    Raises:
        DatasetError: when it is damaged, from the future, or its columns cannot be those of jobs.
        MissingExtraError: when pyarrow is not installed.
    """
    if file.format == "csv":
        csv_header(file)
    if file.format != "parquet":
        return None
    with open_parquet(file) as parquet:
        version = (parquet.schema_arrow.metadata or {}).get(VERSION_KEY)
        if version is not None and version != str(DATASET_VERSION).encode():
            raise DatasetError(
                f"{file.location} has dataset version {version.decode(errors='replace')[:20]}, and this version of gpumemnet "
                f"reads {DATASET_VERSION}: upgrade gpumemnet or write the older form"
            )
        check_columns(parquet.schema_arrow, file.location)
        return [parquet.metadata.row_group(group).num_rows for group in range(parquet.metadata.num_row_groups)]


def plan(number: int, file: InputFile, groups: Sequence[int] | None) -> Iterator[Part]:
    """The parts of the file with position ``number``, in order, as they are found.

    Args:
        number: position of the file.
        file: the file.
        groups: what :func:`check_input` returned of it.

    Raises:
        DatasetError: when the file cannot be read, or a line is longer than :data:`MAX_LINE_BYTES`.
    """
    if groups is not None:
        ends = list(accumulate(groups))
        rows = sum(groups)
        most = _WIDE_PART_ROWS if file.size_bytes > rows * _WIDE_ROW_BYTES else PART_ROWS
        part_rows = min(most, -(-rows // (_LEAST_PARTS * CHUNK_ROWS)) * CHUNK_ROWS)
        for first in range(0, rows, part_rows or 1):
            yield Part(number, first, min(part_rows, rows - first), run=bisect_right(ends, first))
        return
    start = len(csv_header(file)[0]) if file.format == "csv" else 0
    first = 0
    for count, stop in _line_runs(file, start, _WIDE_PART_ROWS):
        yield Part(number, first, count, start, stop, run=start)
        first, start = first + count, stop


def _line_runs(file: InputFile, start: int, run_lines: int) -> Iterator[tuple[int, int]]:
    """Lines of each run, and where it ends; the last line may lack its newline."""
    lines, place, line_start = 0, start, start
    with reading(file) as stream:
        stream.seek(start)
        while block := stream.read(_BLOCK_BYTES):
            ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
            taken = 0
            while lines + len(ends) - taken >= run_lines:
                taken += run_lines - lines
                yield run_lines, place + int(ends[taken - 1]) + 1
                lines = 0
            lines += len(ends) - taken
            line_start = place + int(ends[-1]) + 1 if len(ends) else line_start
            place += len(block)
            if place - line_start > MAX_LINE_BYTES:
                raise DatasetError(f"{file.location} holds a line of more than {MAX_LINE_BYTES} bytes: write one job a line")
    if place > line_start:
        lines += 1
    if lines:
        yield lines, place
