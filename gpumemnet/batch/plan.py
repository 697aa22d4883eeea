"""Divides files into parts, the units of work: one process handles a part, and a finished part
survives a killed run.

A part consists of whole, consecutive chunks.  Parquet rows are located by their row groups.  Lines
are located by their byte offsets, which a fast scan of the file finds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np

from gpumemnet.errors import DatasetError
from gpumemnet.job.arrow_codec import check_columns
from gpumemnet.job.job_files import JobFile, csv_header, dataset_version, open_bytes, open_parquet
from gpumemnet.job.reader import CHUNK_ROWS

PART_ROWS: Final = 64 * CHUNK_ROWS
"""Largest number of rows in a part."""
_WIDE_PART_ROWS: Final = 8 * CHUNK_ROWS
_WIDE_ROW_BYTES: Final = 64
"""Parquet rows larger than this hold layers and take about ten times as long; lines of text always
count as such."""
_LEAST_PARTS: Final = 16
"""Smallest number of parts, if there are enough chunks, so that all processes have work until the
end."""
MAX_LINE_BYTES: Final = 64 * 2**20
_BLOCK_BYTES: Final = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of a file, beginning at the start of a chunk.

    Attributes:
        file: position of the file among the inputs.
        first_row: number of rows (or lines, without the header of a CSV file) before the part.
        row_count: number of rows or lines.
        start, stop: byte offsets of the part in a file of lines; both 0 for Parquet.
        run: number shared by the parts of a file that lie in the same row group; one process should
            read them.
    """

    file: int
    first_row: int
    row_count: int
    start: int = 0
    stop: int = 0
    run: int = 0

    @property
    def name(self) -> str:
        """File name stem of the finished part."""
        return f"{self.file:05d}-{self.first_row:014d}"


def check_input(file: JobFile) -> list[int] | None:
    """Checks a file before the batch starts; returns the row count of each row group for Parquet,
    else ``None``.

    Raises:
        DatasetError: when the file is damaged, has another dataset version, or its columns are not
            those of jobs.
        MissingExtraError: when pyarrow is not installed.
    """
    if file.format == "csv":
        csv_header(file.location)
    if file.format != "parquet":
        return None
    with open_parquet(file.location) as parquet:
        dataset_version(parquet.schema_arrow, file.location)
        check_columns(parquet.schema_arrow, file.location)
        return [
            parquet.metadata.row_group(group).num_rows
            for group in range(parquet.metadata.num_row_groups)
        ]


def plan(number: int, file: JobFile, groups: Sequence[int] | None) -> Iterator[Part]:
    """Yields the parts of a file in order, as they are found.

    Args:
        number: position of the file among the inputs.
        file: the file.
        groups: the result of :func:`check_input` for the file.

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
    start = len(csv_header(file.location)[0]) if file.format == "csv" else 0
    first = 0
    for count, stop in _line_runs(file, start, _WIDE_PART_ROWS):
        yield Part(number, first, count, start, stop, run=start)
        first, start = first + count, stop


def _line_runs(file: JobFile, start: int, run_lines: int) -> Iterator[tuple[int, int]]:
    """Yields the number of lines of each run and the byte offset of its end; the last line may lack
    its newline."""
    lines, offset, line_start = 0, start, start
    with open_bytes(file.location) as stream:
        stream.seek(start)
        while block := stream.read(_BLOCK_BYTES):
            ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
            taken = 0
            while lines + len(ends) - taken >= run_lines:
                taken += run_lines - lines
                yield run_lines, offset + int(ends[taken - 1]) + 1
                lines = 0
            lines += len(ends) - taken
            line_start = offset + int(ends[-1]) + 1 if len(ends) else line_start
            offset += len(block)
            if offset - line_start > MAX_LINE_BYTES:
                raise DatasetError(
                    f"{file.location} holds a line of more than {MAX_LINE_BYTES} bytes: write one job a line"
                )
    if offset > line_start:
        lines += 1
    if lines:
        yield lines, offset
