"""Runs a batch: divides the inputs into parts, predicts them with an engine, and joins the finished
parts into the output."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpumemnet.batch.job_part import Work
from gpumemnet.batch.local_engine import answer_here, answer_in_processes
from gpumemnet.batch.options import BatchOptions, checked_names
from gpumemnet.batch.outputs import Output, check_writable, rejected_location
from gpumemnet.batch.plan import Part, check_input, plan
from gpumemnet.batch.progress import Meter
from gpumemnet.batch.scratch import Scratch, Tally, batch_key, scratch_of
from gpumemnet.errors import DatasetError, InvalidRequestError
from gpumemnet.job.job_files import (
    JobFile,
    find_files,
    format_of,
    import_pyarrow,
    is_url,
    local_path,
)

ENGINES: Final = ("local", "ray")
_FEW_ROWS: Final = 20_000
_FEW_BYTES: Final = 4 * 2**20
"""Batches up to this size run in this process, because starting others would take longer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a batch.

    Attributes:
        tally: the counts.
        seconds: duration of this run.
        rate: rows per second, without those of earlier runs.
        rejected: file of the rejected rows; ``None`` when there are none.
    """

    tally: Tally
    seconds: float
    rate: float
    rejected: str | None


def predict_files(
    patterns: Sequence[str],
    out: str,
    options: BatchOptions,
    *,
    engine: str = "local",
    workers: int | None = None,
) -> Outcome:
    """Predicts every job in the input files and writes the answers to ``out``, which appears only
    when complete.

    Args:
        patterns: paths, globs or URLs of ``.parquet``, ``.csv``, ``.jsonl`` or ``.ndjson`` files.
        out: path or URL; the suffix selects the format.
        options: the options of the prediction.
        engine: ``local`` for processes on this machine, ``ray`` for a cluster.
        workers: number of processes; by default the number of cores.

    Raises:
        InvalidRequestError: when an option is invalid.
        DatasetError: when a file is damaged or cannot be written, or no row can be answered.
        MissingExtraError: when a package is not installed.
    """
    import_pyarrow("predicting into a file")
    if engine not in ENGINES:
        raise InvalidRequestError(f"must be one of {', '.join(ENGINES)}, not {engine!r}", "engine")
    if workers is not None and workers < 1:
        raise InvalidRequestError(f"must be at least 1, not {workers}", "workers")
    output_format = format_of(out, "out")
    out = out if is_url(out) else str(local_path(out))
    inputs = find_files(patterns)
    check_writable(out, [file.location for file in inputs])
    groups = [check_input(file) for file in inputs]
    rows = [None if each is None else sum(each) for each in groups]
    predictor = options.predictor()
    work = Work(options, checked_names(predictor, options), tuple(inputs), output_format)
    key = batch_key(inputs, work.names, options, output_format)
    folder, name = _scratch_location(out)
    with scratch_of(folder, name, key, output_format) as scratch, Meter(_total(rows)) as meter:
        batch = _Batch(work, scratch, groups, meter, Output(out, output_format, scratch))
        try:
            if engine == "ray":
                from gpumemnet.batch.ray_engine import answer_on_ray

                answer_on_ray(work, scratch, workers, batch.unfinished(), meter.advance, batch.done)
            elif workers == 1 or _is_small(inputs, rows) or any(map(_is_in_memory, inputs)):
                answer_here(work, scratch, predictor, batch.unfinished(), meter.advance, batch.done)
            else:
                del predictor
                count = workers or len(os.sched_getaffinity(0))
                answer_in_processes(
                    work, scratch, count, batch.unfinished(), meter.advance, batch.done
                )
            tally = batch.finish()
        finally:
            batch.output.close()
        scratch.remove()
    rejected = rejected_location(out) if tally.rejected else None
    if rejected and not tally.answered:
        raise DatasetError(
            f"none of the {tally.rejected:,} rows is a job that can be answered: {rejected} says why"
        )
    return Outcome(tally, meter.seconds, meter.rate, rejected)


class _Batch:
    """Tracks the parts of a batch from plan to output."""

    def __init__(
        self,
        work: Work,
        scratch: Scratch,
        groups: Sequence[list[int] | None],
        meter: Meter,
        output: Output,
    ) -> None:
        self._work = work
        self._scratch = scratch
        self._groups = groups
        self._meter = meter
        self.output = output
        self._planned: list[Part] = []
        self._finished: dict[Part, Tally] = {}
        self._joined = 0
        self._tally = Tally()

    def unfinished(self) -> Iterator[Part]:
        """Yields the parts that are not finished; adds those of an earlier run to the output."""
        for number, (file, groups) in enumerate(zip(self._work.inputs, self._groups, strict=True)):
            for part in plan(number, file, groups):
                self._planned.append(part)
                self._expect()
                tally = self._scratch.tally(part)
                if tally is None:
                    yield part
                else:
                    self._meter.skip(part.row_count)
                    self.done(part, tally)

    def done(self, part: Part, tally: Tally) -> None:
        """Records a finished part, and joins all parts that are next in order."""
        self._finished[part] = tally
        while self._joined < len(self._planned) and self._planned[self._joined] in self._finished:
            following = self._planned[self._joined]
            self.output.add(following)
            self._tally += self._finished.pop(following)
            self._joined += 1

    def finish(self) -> Tally:
        """Publishes the output and returns the counts."""
        is_empty = not self._tally.answered and self._tally.rejected > 0
        self.output.publish(is_empty, self._tally.rejected > 0)
        return self._tally

    def _expect(self) -> None:
        """Updates the estimated total of rows; uncounted lines are assumed to be as long as the
        counted ones."""
        if None not in self._groups:
            return
        lines = [part for part in self._planned if part.stop]
        size_bytes = sum(part.stop - part.start for part in lines)
        counted = sum(part.row_count for part in lines)
        all_bytes = sum(
            file.size_bytes
            for file, groups in zip(self._work.inputs, self._groups, strict=True)
            if groups is None
        )
        if size_bytes:
            known = sum(sum(groups) for groups in self._groups if groups is not None)
            self._meter.expect(known + max(counted, round(all_bytes * counted / size_bytes)))


def _total(rows: Sequence[int | None]) -> int | None:
    known = [count for count in rows if count is not None]
    return sum(known) if len(known) == len(rows) else None


def _is_small(inputs: Sequence[JobFile], rows: Sequence[int | None]) -> bool:
    size_bytes = sum(
        file.size_bytes for file, count in zip(inputs, rows, strict=True) if count is None
    )
    return sum(count or 0 for count in rows) <= _FEW_ROWS and size_bytes <= _FEW_BYTES


def _is_in_memory(file: JobFile) -> bool:
    """Whether the file exists only in the memory of this process."""
    return file.location.startswith("memory://")


def _scratch_location(out: str) -> tuple[Path, str]:
    """Parent folder and name of the scratch folder: next to a local output, or in the user's cache
    for an output in a store."""
    if not is_url(out):
        path = local_path(out)
        return path.parent, path.name
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "gpumemnet" / "batch", hashlib.sha256(out.encode()).hexdigest()[:16]
