"""Asks estimators for the rows of a set, and keeps what takes time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from gpumemnet.errors import DatasetError, GpumemnetError
from gpumemnet.gpu import DeviceProfile
from gpumemnet.job.measurement import Measurement
from gpumemnet.units import GIB
from research.estimators.dnnmem import DNNMEM, DNNMEM_OF_MODULES
from research.estimators.estimator import PublishedEstimator, Subject, Training, subject_of
from research.estimators.fake_tensor import FAKE_TENSOR, MEM_TRACKER
from research.estimators.formulas import ACCELERATE, COPIES, HORUS, NAIVE, ZERO2, ZERO3
from research.estimators.transformer_formulas import ELEUTHER, KORTHIKANTI, LLMEM
from research.estimators.xmem import XMEM
from research.traces.rebuilt import rebuilt

from .answers import Answer, KeptAnswers, asked
from .ours import CLOSED_FORM, TRACE, traced_run
from .sets import RowSet

Progress = Callable[[str, float], None]
FORMULAS: Final = (
    *(NAIVE, COPIES, HORUS, ACCELERATE, ZERO2, ZERO3, ELEUTHER, KORTHIKANTI, LLMEM),
    *(CLOSED_FORM, TRACE),
)
"""Estimators that take less than a millisecond: they answer for all rows, and are asked anew each
time."""
OF_MODELS: Final = (FAKE_TENSOR, MEM_TRACKER, DNNMEM, DNNMEM_OF_MODULES)
"""Estimators that need the model: they answer for the sample, and their answers are kept."""
TRACED_AGAIN: Final = "gpumemnet, trace run again"
"""Under this name the trace's seconds and its safe bytes are kept."""
SPARE: Final = "bytes to spare"
"""Under this name is kept how much less the job would have done with."""
KEPT_EVERY_SECONDS: Final = 20.0
CPU_RUN_BYTES: Final = 2 * GIB
"""Largest traced memory of a job that is run on the CPU."""


def formula_answers(
    rows: RowSet, estimator: PublishedEstimator, answers: KeptAnswers
) -> dict[int, Answer]:
    """Answers of a formula for all rows.

    Its typical seconds are kept when it is asked for the first time, so that the page is the same
    each time.
    """
    found = {number: asked(estimator, _subject(rows, number)) for number in range(len(rows))}
    kept_as = f"{estimator.name}, seconds"
    if not answers.of(rows.recipe.name, rows.sha256, kept_as):
        typical = float(np.median([answer.seconds for answer in found.values()]))
        answers.keep(rows.recipe.name, rows.sha256, kept_as, {0: Answer(None, typical)})
    seconds = answers.of(rows.recipe.name, rows.sha256, kept_as)[0].seconds
    return {number: replace(answer, seconds=seconds) for number, answer in found.items()}


def answer_sample(
    rows: RowSet,
    numbers: Sequence[int],
    estimators: Sequence[PublishedEstimator],
    answers: KeptAnswers,
    progress: Progress,
    end: float | None = None,
) -> None:
    """Ask estimators that need the model, row by row, for what is not kept yet.

    Args:
        rows: the set.
        numbers: rows of its sample.
        estimators: to ask; the trace is run again beside them.
        answers: where answers are kept.
        progress: called with a step and its share.
        end: moment by :func:`time.monotonic` after which nothing new is asked; ``None`` for no
            limit.

    Raises:
        DatasetError: a library of the models is missing or of another version.
    """
    name = rows.recipe.name
    kept = {each.name: answers.of(name, rows.sha256, each.name) for each in estimators}
    traced = answers.of(name, rows.sha256, TRACED_AGAIN)
    last = time.monotonic()
    for done, number in enumerate(numbers):
        if end is not None and time.monotonic() >= end:
            break
        subject = _subject(rows, number, rebuilt)
        for estimator in estimators:
            if number not in kept[estimator.name]:
                answers.keep(name, rows.sha256, estimator.name, {number: asked(estimator, subject)})
        if number not in traced:
            for kept_as, answer in _traced(subject).items():
                answers.keep(name, rows.sha256, kept_as, {number: answer})
        progress(f"{rows.recipe.title}: estimators that need the model", (done + 1) / len(numbers))
        if time.monotonic() - last > KEPT_EVERY_SECONDS:
            answers.write()
            last = time.monotonic()
    answers.write()


def answer_cpu_runs(rows: RowSet, answers: KeptAnswers, progress: Progress, end: float) -> None:
    """Run jobs of the sample on the CPU, in its order, until ``end``; what is kept is not run
    again.

    Jobs above :data:`CPU_RUN_BYTES` are left out: a run on the CPU needs the memory of the job, and
    minutes.
    """
    name = rows.recipe.name
    kept = answers.of(name, rows.sha256, XMEM.name)
    wanted = [row for row in rows.order[: rows.recipe.sample] if _is_small(rows.rows[row])]
    for done, number in enumerate(wanted):
        if time.monotonic() >= end:
            break
        if number not in kept:
            found = {number: asked(XMEM, _subject(rows, number, rebuilt))}
            answers.keep(name, rows.sha256, XMEM.name, found)
            answers.write()
        progress(f"{rows.recipe.title}: runs on the CPU", (done + 1) / len(wanted))


def _is_small(row: Measurement) -> bool:
    return row.job.traced_peak_bytes is not None and row.job.traced_peak_bytes <= CPU_RUN_BYTES


def _traced(subject: Subject) -> dict[str, Answer]:
    """What the trace says, and what the job could have spared, each under the name by which it is
    kept."""
    start = time.perf_counter()
    try:
        run = traced_run(subject)
    except GpumemnetError as error:
        if isinstance(error, DatasetError):
            raise
        none = Answer(None, time.perf_counter() - start, reason=str(error)[:160])
        return {TRACED_AGAIN: none, SPARE: none}
    return {
        TRACED_AGAIN: Answer(run.expected_bytes, run.seconds, run.safe_bytes),
        SPARE: Answer(run.spare_bytes, 0.0),
    }


def _subject(
    rows: RowSet,
    number: int,
    build: Callable[[Measurement, DeviceProfile], Training] | None = None,
) -> Subject:
    row = rows.rows[number]
    return subject_of(row, rows.architecture(number), build)
