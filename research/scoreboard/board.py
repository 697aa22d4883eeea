"""Puts the answers of all estimators side by side: tables of figures on equal rows, for each
set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from research.estimators.transformer_formulas import LLMEM
from research.estimators.xmem import XMEM

from .answers import Answer, KeptAnswers
from .collect import FORMULAS, OF_MODELS, SPARE, TRACED_AGAIN, formula_answers
from .fitted import LEARNED, SCHEDTUNE
from .ours import TRACE
from .protocol import Figures, calibrated, failures, figures
from .sets import PublishedTool, RowSet

Array = NDArray[np.float64]
SAMPLE_TITLE: Final = "the sample, without the run on the CPU"
_SORTED_DIGITS: Final = 9
"""Errors that differ by less are equal but for the processor's rounding: names decide."""
FEWEST_ROWS: Final = 8
"""Fewer rows make no table: a median of less says nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """All answers of one estimator on a set.

    Attributes:
        name: of the estimator.
        answers: row → answer, those without an amount left out.
        run_again: row → whether its run failed when it was run again on the GPU, where that was
            published.
        refused: rows for which it has no answer.
    """

    name: str
    answers: Mapping[int, Answer]
    run_again: Mapping[int, float]
    refused: int


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """One line of a table.

    Attributes:
        name: of the estimator.
        raw: figures as it comes; with_line: with a line fitted on other architecture families.
        bound: of its own bound at 99 %, on the same line, where it gives one; else of the line
            times the ratio that covers 99 % of the other families.
        both_failures: probability of failure where the line says whether a run fits, and the bound
            is its limit.
    """

    name: str
    raw: Figures
    with_line: Figures
    bound: Figures
    both_failures: float


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """Figures of several estimators on equal rows.

    Attributes:
        title: which rows they are.
        asked: number of rows that the estimators were asked for.
        rows, out_of_memory: number of rows that all of them answered, and of those that ran out of
            memory.
        lines: best median error first, in whichever form it is better.
        left_out: estimators with too few answers → number of answers.
    """

    title: str
    asked: int
    rows: int
    out_of_memory: int
    lines: tuple[Line, ...]
    left_out: Mapping[str, int]


def columns(rows: RowSet, answers: KeptAnswers) -> list[Column]:
    """The answers of every estimator on a set."""
    found = [
        _column(estimator.name, formula_answers(rows, estimator, answers)) for estimator in FORMULAS
    ]
    kept = [*(estimator.name for estimator in OF_MODELS), XMEM.name, SCHEDTUNE, *LEARNED]
    found += [_column(name, answers.of(rows.recipe.name, rows.sha256, name)) for name in kept]
    found += [_published(rows, tool) for tool in rows.recipe.tools]
    again = answers.of(rows.recipe.name, rows.sha256, TRACED_AGAIN)
    return [_traced(column, again) if column.name == TRACE.name else column for column in found]


def _column(name: str, answers: Mapping[int, Answer]) -> Column:
    given = {row: answer for row, answer in answers.items() if answer.total_bytes is not None}
    return Column(name, given, {}, len(answers) - len(given))


def _traced(column: Column, again: Mapping[int, Answer]) -> Column:
    """The trace with what only its run tells: the seconds, and how far the safe bytes lie above the
    answer."""
    seconds = [answer.seconds for answer in again.values() if answer.total_bytes is not None]
    typical = float(np.median(seconds)) if seconds else np.nan
    found = {}
    for row, answer in column.answers.items():
        run = again.get(row)
        is_bounded = run is not None and run.total_bytes is not None and run.bound_bytes is not None
        bound = answer.total_bytes + run.bound_bytes - run.total_bytes if is_bounded else None  # type: ignore[operator, union-attr]
        found[row] = Answer(answer.total_bytes, typical, bound)
    return Column(column.name, found, column.run_again, column.refused)


def _published(rows: RowSet, tool: PublishedTool) -> Column:
    """What a tool's authors published for these runs."""
    found, failed = {}, {}
    for row in range(len(rows)):
        told = rows.options(row)
        value = told.get(tool.option)
        if value is None or value <= 0:
            continue
        seconds = float(told.get(f"{tool.outcome}_seconds") or np.nan)
        found[row] = Answer(round(value * tool.unit_bytes), seconds)
        forecast, again = (
            told.get(f"{tool.outcome}_{word}") for word in ("oom", "verification_oom")
        )
        if forecast is not None and again is not None:
            ran_out = bool(np.isnan(rows.labels[row]))
            failed[row] = float(forecast != ran_out or (not ran_out and again))
    return Column(tool.name, found, failed, len(rows) - len(found))


def tables(rows: RowSet, every: Sequence[Column], answers: KeptAnswers) -> list[Table]:
    """The tables of a set: with every estimator that ran the model, with those that need no run,
    and on all rows."""
    sample = [
        row
        for row in rows.order[: rows.recipe.sample]
        if row in answers.of(rows.recipe.name, rows.sha256, TRACED_AGAIN)
    ]
    run = [
        row
        for row in sample
        if any(column.name == XMEM.name and row in column.answers for column in every)
    ]
    spare = spare_bytes(rows, answers)
    texts = [
        row
        for row in sample
        if any(column.name == LLMEM.name and row in column.answers for column in every)
    ]
    slow = {XMEM.name, *(estimator.name for estimator in OF_MODELS)}
    cheap = [column for column in every if column.name not in slow]
    choices = [
        ("rows of the sample that were run on the CPU", run, every),
        (SAMPLE_TITLE, sample, [column for column in every if column.name != XMEM.name]),
        (
            "language models of the sample, without the run on the CPU",
            texts,
            [c for c in every if c.name != XMEM.name],
        ),
        ("all rows, without estimators that need the model", list(range(len(rows))), cheap),
    ]
    made: list[Table] = []
    for title, numbers, wanted in choices:
        if len(numbers) >= FEWEST_ROWS and len(numbers) not in {table.asked for table in made}:
            made.append(_table(rows, title, numbers, wanted, spare))
    return made


def spare_bytes(rows: RowSet, answers: KeptAnswers) -> Array:
    """Bytes that each run could have done without, by the simulated allocator; NaN where not traced
    anew, shape ``[B]``."""
    spare = np.full(len(rows), np.nan)
    for row, answer in answers.of(rows.recipe.name, rows.sha256, SPARE).items():
        if answer.total_bytes is not None:
            spare[row] = answer.total_bytes
    return spare


def agreement(
    rows: RowSet, every: Sequence[Column], answers: KeptAnswers
) -> dict[str, tuple[int, float]]:
    """How the simulated test of a limit compares with the runs that others repeated on the GPU.

    Returns:
        tool → number of runs that ended well and were repeated, and the share in which both tests
        say the same.
    """
    spare, found = spare_bytes(rows, answers), {}
    for column in every:
        numbers = np.array(
            [
                row
                for row in column.run_again
                if not np.isnan(rows.labels[row] + spare[row])
                and column.answers[row].total_bytes <= rows.capacities[row]
            ],
            dtype=np.int64,
        )
        if len(numbers):
            given = np.array(
                [column.answers[row].total_bytes for row in numbers.tolist()], dtype=np.float64
            )
            simulated = failures(
                rows.labels[numbers], given, rows.capacities[numbers], spare[numbers]
            )
            told = np.array([column.run_again[row] for row in numbers.tolist()])
            found[column.name] = len(numbers), float((simulated == told).mean())
    return found


def _table(
    rows: RowSet, title: str, numbers: Sequence[int], every: Sequence[Column], spare: Array
) -> Table:
    """One table, on the rows that all estimators with enough answers have in common.

    An estimator that answers for less than half of the rows is left out, so that one for language
    models does not take all other rows away.
    """
    left_out: dict[str, int] = {}
    taking_part = []
    for column in every:
        answered = sum(row in column.answers for row in numbers)
        if 2 * answered < len(numbers):
            left_out[column.name] = answered
        else:
            taking_part.append(column)
    common = [row for row in numbers if all(row in column.answers for column in taking_part)]
    lines = (
        [_line(rows, column, np.array(common, dtype=np.int64), spare) for column in taking_part]
        if common
        else []
    )
    lines.sort(
        key=lambda each: (
            round(min(each.raw.median_error, each.with_line.median_error), _SORTED_DIGITS),
            each.name,
        )
    )
    ran_out = int(np.isnan(rows.labels[common]).sum())
    return Table(title, len(numbers), len(common), ran_out, tuple(lines), left_out)


def _line(rows: RowSet, column: Column, numbers: NDArray[np.int64], spare: Array) -> Line:
    every = np.array(sorted(column.answers), dtype=np.int64)
    place = {row: index for index, row in enumerate(every.tolist())}
    chosen = np.array([place[row] for row in numbers.tolist()], dtype=np.int64)
    given = np.array([column.answers[row].total_bytes for row in every.tolist()], dtype=np.float64)
    seconds = np.array([column.answers[row].seconds for row in every.tolist()])
    bounds = np.array(
        [column.answers[row].bound_bytes or np.nan for row in every.tolist()], dtype=np.float64
    )
    has_bounds = not np.isnan(bounds[chosen]).any()
    fitted = calibrated(
        rows.labels[every], given, rows.groups[every], bounds if has_bounds else None
    )
    again = np.array([column.run_again.get(row, np.nan) for row in numbers.tolist()])

    def judged(amounts: Array, told: Array | None = None) -> Figures:
        return figures(
            rows.labels[numbers],
            amounts[chosen],
            rows.capacities[numbers],
            spare[numbers],
            seconds[chosen],
            rows.recipe.bins,
            told,
        )

    was_run_again = bool(column.run_again) and not np.isnan(again).any()
    raw, with_line, bound = (
        judged(given, again if was_run_again else None),
        judged(fitted.expected_bytes),
        judged(fitted.bound_bytes),
    )
    expected, limits = fitted.expected_bytes[chosen], fitted.bound_bytes[chosen]
    both = failures(
        rows.labels[numbers], expected, rows.capacities[numbers], spare[numbers], limits
    )
    return Line(column.name, raw, with_line, bound, float(both.mean()))
