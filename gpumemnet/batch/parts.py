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
from gpumemnet.job.job_files import (
    JobFile,
    csv_header,
    open_bytes,
    open_parquet,
)
from gpumemnet.job.table_reader import CHUNK_ROWS, Span

PART_ROWS: Final = 64 * CHUNK_ROWS
"""Largest number of rows in a part."""
_WIDE_PART_ROWS: Final = 8 * CHUNK_ROWS
_WIDE_ROW_BYTES: Final = 64
"""Parquet rows larger than this hold layers and take about ten times as long; lines of text always
count as such."""
_LEAST_PARTS: Final = 16
"""Smallest number of parts, if there are enough chunks, so that all processes have work until the
end."""
_MAX_LINE_BYTES: Final = 64 * 2**20
_BLOCK_BYTES: Final = 4 * 2**20


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a file.

    Attributes:
        number: position of the file among the inputs.
        file: the file.
        first_row, row_count, start: see :class:`~gpumemnet.job.table_reader.Span`.
        group: number of the row group that the part begins in; in a file of lines, of the part.
    """

    number: int
    file: JobFile
    first_row: int
    row_count: int
    start: int
    group: int

    @property
    def span(self) -> Span:
        """The rows of the part."""
        return Span(self.first_row, self.row_count, self.start)

    @property
    def name(self) -> str:
        """File name stem of the finished part."""
        return f"{self.number:05d}-{self.first_row:014d}"


def divide(files: Sequence[JobFile]) -> list[Part]:
    """Checks the files, and divides them into parts in order.

    Raises:
        DatasetError: when a file is damaged, has another dataset version, its columns are not those
            of jobs, or a line is longer than 64 MiB.
        MissingExtraError: when pyarrow is not installed.
    """
    groups = [_row_groups(file) for file in files]  # a bad header is found before long scans
    parts = []
    for number, (file, ends) in enumerate(zip(files, groups, strict=True)):
        if ends is None:
            start = len(csv_header(file.location)[0]) if file.format == "csv" else 0
            first = 0
            for count, stop in _line_runs(file, start):
                parts.append(Part(number, file, first, count, start, first))
                first, start = first + count, stop
            continue
        rows = ends[-1] if ends else 0
        most = _WIDE_PART_ROWS if file.size_bytes > rows * _WIDE_ROW_BYTES else PART_ROWS
        size = min(most, -(-rows // (_LEAST_PARTS * CHUNK_ROWS)) * CHUNK_ROWS)
        parts += [
            Part(number, file, first, min(size, rows - first), 0, bisect_right(ends, first))
            for first in range(0, rows, size or 1)
        ]
    return parts


def _row_groups(file: JobFile) -> list[int] | None:
    """Checks the header of a file; returns the number of rows up to the end of each row group for
    Parquet, else ``None``."""
    if file.format == "csv":
        csv_header(file.location)
    if file.format != "parquet":
        return None
    with open_parquet(file.location) as parquet:
        check_columns(parquet.schema_arrow, file.location)
        metadata = parquet.metadata
        return list(
            accumulate(metadata.row_group(each).num_rows for each in range(metadata.num_row_groups))
        )


def _line_runs(file: JobFile, start: int) -> Iterator[tuple[int, int]]:
    """Yields the number of lines of each run and the byte offset of its end; the last line may lack
    its newline."""
    lines, offset, line_start = 0, start, start
    with open_bytes(file.location) as stream:
        stream.seek(start)
        while block := stream.read(_BLOCK_BYTES):
            ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
            taken = 0
            while lines + len(ends) - taken >= _WIDE_PART_ROWS:
                taken += _WIDE_PART_ROWS - lines
                yield _WIDE_PART_ROWS, offset + int(ends[taken - 1]) + 1
                lines = 0
            lines += len(ends) - taken
            line_start = offset + int(ends[-1]) + 1 if len(ends) else line_start
            offset += len(block)
            if offset - line_start > _MAX_LINE_BYTES:
                raise DatasetError(
                    f"{file.location} holds a line of more than {_MAX_LINE_BYTES} bytes: write one job a line"
                )
    if offset > line_start:
        lines += 1
    if lines:
        yield lines, offset
