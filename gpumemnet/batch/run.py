"""Runs a batch: divides the inputs into parts, predicts them with an engine, and joins the finished
parts into the output."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Final
from unittest.mock import patch

from rich.console import Console
from rich.progress import Progress

from gpumemnet.batch.finished_parts import (
    Output,
    PartFiles,
    Tally,
    batch_key,
    checked_output,
    part_files,
    rejected_file,
)
from gpumemnet.batch.part_predictions import BatchOptions, PartPredictor
from gpumemnet.batch.parts import Part, divide
from gpumemnet.errors import DatasetError, InvalidRequestError
from gpumemnet.job.job_files import find_files, format_of, import_pyarrow
from gpumemnet.job.layers import check_choice
from gpumemnet.sandbox import end_with_parent

ENGINES: Final = ("local", "ray")
_FEW_ROWS: Final = 20_000
"""Batches up to this size run in this process, because starting others would take longer."""
_RUNS_PER_WORKER: Final = 4
_WORKER_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Every chunk allocates and frees arrays of a few MiB: with these limits the C library keeps
    # that memory for reuse.
    "MALLOC_MMAP_THRESHOLD_": str(64 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
}


@dataclass(frozen=True)
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
    rejected: Path | None


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
        out: a path; the suffix selects the format.
        options: the options of the prediction.
        engine: ``local`` for processes on this machine, ``ray`` for a cluster.
        workers: number of processes; by default the number of cores.

    Raises:
        InvalidRequestError: when an option is invalid.
        DatasetError: when a file is damaged or cannot be written, or no row can be answered.
        MissingExtraError: when a package is not installed.
    """
    import_pyarrow("predicting into a file")
    check_choice(engine, ENGINES, "engine")
    if workers is not None and workers < 1:
        raise InvalidRequestError(f"must be at least 1, not {workers}", "workers")
    output_format = format_of(out, "out")
    files = find_files(patterns)
    path = checked_output(out, files)
    parts = divide(files)
    predictor = PartPredictor(options)
    key = batch_key(files, predictor.hash_of_model, predictor.gpu, options, output_format)
    with part_files(path, key, output_format) as kept:
        tallies = kept.finished()
        missing = [part for part in parts if part.name not in tallies]
        results: Generator[tuple[Part, Tally]]
        if engine == "ray":
            from gpumemnet.batch.ray_engine import predict_on_ray

            results = predict_on_ray(kept, options, predictor.hash_of_model, missing, workers)
        elif workers == 1 or sum(part.row_count for part in missing) <= _FEW_ROWS:
            results = ((part, kept.keep(part, predictor.predict(part))) for part in missing)
        else:
            del predictor  # its memory is needed in the workers
            count = workers or len(os.sched_getaffinity(0))
            results = _predict_in_processes(kept, options, missing, count)
        started = time.monotonic()
        rows, missing_rows = (sum(part.row_count for part in some) for some in (parts, missing))
        waiting = deque(parts)
        with (
            closing(results),
            Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar,
            Output(path, kept) as output,
        ):
            task = bar.add_task("rows", total=rows, completed=rows - missing_rows)
            for part, tally in results:
                tallies[part.name] = tally
                bar.update(task, advance=tally.rows)
                while waiting and waiting[0].name in tallies:
                    output.add(waiting.popleft())
            for part in waiting:  # what only earlier runs finished
                output.add(part)
            counts = zip(*(tallies[part.name] for part in parts), strict=True)
            total = Tally(*map(sum, counts))
            output.publish(total)
    rejected = rejected_file(path) if total.rejected else None
    if rejected and not total.answered:
        raise DatasetError(
            f"none of the {total.rejected:,} rows is a job that can be answered: {rejected} says why"
        )
    seconds = time.monotonic() - started
    return Outcome(total, seconds, missing_rows / max(seconds, 1e-9), rejected)


# Workers.


def _predict_in_processes(
    kept: PartFiles, options: BatchOptions, parts: Sequence[Part], count: int
) -> Generator[tuple[Part, Tally]]:
    """Predicts the parts in ``count`` processes; yields each as it is finished."""
    # Rows of a row group can only be reached by reading the ones before them, so one process reads
    # the whole group where there are enough groups.
    runs = [list(run) for _, run in groupby(parts, key=lambda part: (part.number, part.group))]
    if len(runs) < _RUNS_PER_WORKER * count:
        runs = [[part] for part in parts]
    with (
        patch.dict(os.environ, _WORKER_ENVIRONMENT),
        ProcessPoolExecutor(
            count, get_context("spawn"), initializer=_start_worker, initargs=(kept, options)
        ) as pool,
    ):
        try:
            # Ctrl-C reaches all processes: the workers inherit the block, and this one stops them.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                futures = {pool.submit(_predict_run, run): run for run in runs}
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            for future in as_completed(futures):
                yield from zip(futures[future], future.result(), strict=True)
        except BrokenProcessPool:
            raise DatasetError(
                "a worker process ended before its time: where memory ran out try fewer --workers; "
                "finished parts are kept: the same command, run again, goes on"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


_worker: tuple[PartFiles, PartPredictor] | None = None
"""The settings and models of a worker process."""


def _start_worker(kept: PartFiles, options: BatchOptions) -> None:
    import pyarrow as pa

    global _worker
    end_with_parent()
    pa.set_cpu_count(1)  # every core has its own worker
    pa.set_io_thread_count(1)
    _worker = kept, PartPredictor(options)


def _predict_run(parts: Sequence[Part]) -> list[Tally]:
    assert _worker is not None
    kept, predictor = _worker
    return [kept.keep(part, predictor.predict(part)) for part in parts]
