"""Joins datasets of several GPUs, hosts and campaigns into one, so that each job occurs once.
Nothing is averaged.

Equal rows are taken once.  Of a job that was measured again with the same outcome, the most
informative row is kept. Contradicting rows are an error unless the caller states which to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpumemnet.errors import DatasetError
from gpumemnet.job.dataset import read_dataset, write_dataset
from gpumemnet.job.measurement import STATUSES, Measurement, identity
from gpumemnet.units import MIB, format_bytes

from .measure.journal import read_journal

LABEL_TOLERANCE_BYTES: Final = 2 * MIB
"""Labels of the same job on the same GPU and software agree within this: one small segment of the
caching allocator."""


@dataclass(frozen=True)
class Row:
    """A measurement and the place that it was read from; ``number`` counts from 1."""

    source: Path
    number: int
    measurement: Measurement

    def __str__(self) -> str:
        one, outcome = self.measurement, self.measurement.status
        if one.label_bytes is not None:
            outcome = format_bytes(one.label_bytes)
        elif outcome == "oom":
            outcome = f"out of memory with {format_bytes(one.capacity_bytes)} free"
        return f"{self.source} row {self.number} ({outcome})"


@dataclass(frozen=True)
class Merged:
    """The result of a merge.

    Attributes:
        read, written: rows of the sources, and of the result.
        repeats: rows left out because the same job was there already and they add nothing.
        conflicts: contradictions in words, of which the first row was kept.
    """

    read: int
    written: int
    repeats: int
    conflicts: tuple[str, ...]


def read_source(source: Path) -> list[Measurement]:
    """The rows of a dataset, or those that a campaign has finished.

    Args:
        source: a Parquet file, or the folder of a campaign, running or not.

    Raises:
        DatasetError: when it cannot be read.
    """
    return list(read_journal(source) if source.is_dir() else read_dataset(source))


def merge_datasets(
    sources: Sequence[Path],
    out: Path,
    keep_first: bool = False,
) -> Merged:
    """Write the rows of ``sources`` to ``out``, in their order; ``out`` may be one of them, and
    holds the old file or the new.

    Rows of the same job, GPU model and software (:func:`~gpumemnet.job.measurement.identity`)
    contradict each other when their labels are more than 2 MiB apart, or when one ran out of memory
    where another needed less.

    Args:
        sources: datasets and folders of campaigns; all are read before anything is written.
        out: Parquet file to write.
        keep_first: whether the row that comes first is kept of rows that contradict each other.

    Raises:
        DatasetError: on contradictions, unless ``keep_first``; when a source cannot be read, or the
            result cannot be written.
    """
    rows = [
        Row(path, number, one)
        for path in sources
        for number, one in enumerate(read_source(path), start=1)
    ]
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(identity(row.measurement), []).append(row)
    kept: set[int] = set()
    conflicts: list[str] = []
    for group in groups.values():
        best = min(group, key=_rank)
        contradicting = [row for row in group if _contradicts(best.measurement, row.measurement)]
        conflicts += [f"{best} contradicts {row}" for row in contradicting]
        first = next(row for row in group if row is best or row in contradicting)
        kept.add(id(first))
    if conflicts and not keep_first:
        sentence = (
            f"{len(conflicts):,} rows contradict another measurement of the same job, GPU and software, nothing was written: "
            "measure those jobs again, or give --keep-first"
        )
        raise DatasetError("\n".join([sentence, *conflicts]))
    written = write_dataset(out, (row.measurement for row in rows if id(row) in kept))
    repeats = len(rows) - written - len(conflicts)
    return Merged(len(rows), written, repeats, tuple(conflicts))


def _rank(row: Row) -> tuple[int, int]:
    """Sort key, smallest for the most informative row: a label, then the highest bound that a job
    was seen to break."""
    one = row.measurement
    return STATUSES.index(one.status), -one.capacity_bytes if one.status == "oom" else 0


def _contradicts(best: Measurement, other: Measurement) -> bool:
    """Whether ``other``, which is no more informative than ``best``, contradicts it."""
    label = best.label_bytes
    if label is None:
        return False
    if other.label_bytes is not None:
        return abs(other.label_bytes - label) > LABEL_TOLERANCE_BYTES
    return other.status == "oom" and label + LABEL_TOLERANCE_BYTES < other.capacity_bytes
