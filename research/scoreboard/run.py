"""Makes the scoreboard: asks what is not kept yet, judges, and writes the page."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from gpumemnet.errors import DatasetError

from .answers import KeptAnswers
from .board import Table, agreement, columns, tables
from .collect import OF_MODELS, Progress, answer_cpu_runs, answer_sample
from .fitted import LEARNED, SCHEDTUNE, Found, real_answers, sampled_answers, schedtune_answers
from .page import write_page
from .sets import SETS, RowSet, load_set

ANSWERS: Final = "answers.json.gz"
SMOKE_ROWS: Final = 40
SMOKE_SAMPLE: Final = 2
SMOKE_SETS: Final = ("mlp", "cnn")


def make_scoreboard(
    out: Path,
    datasets: Path,
    *,
    seconds: float | None,
    cpu_seconds: float,
    renew: Sequence[str] = (),
    smoke: bool = False,
    command: str,
    progress: Progress,
    warn: Callable[[str], None],
) -> Path:
    """Make the scoreboard in ``out``; returns the path of its page.

    Args:
        out: the folder; answers that were kept there are used again.
        datasets: folder of the datasets.
        seconds: time for estimators that need the model; ``None`` for no limit, 0 to ask and to
            train none.
        cpu_seconds: time for runs on the CPU, in equal parts for the sets.
        renew: estimators whose kept answers are dropped and asked for again.
        smoke: whether to do a small part only: two sets of sampled networks, a few rows, nothing
            that trains for long.
        command: that makes the page, for the page.
        progress: called with a step and its share.
        warn: called with a sentence where the models of a set cannot be built.

    Raises:
        DatasetError: a dataset cannot be read.
        InvalidRequestError: no answers of an estimator to renew are kept.
    """
    answers = KeptAnswers(out / ANSWERS)
    for estimator in renew:
        answers.forget(estimator)
    recipes = (
        [replace(each, sample=SMOKE_SAMPLE) for each in SETS if each.name in SMOKE_SETS]
        if smoke
        else SETS
    )
    sets = [load_set(recipe, datasets, SMOKE_ROWS if smoke else None) for recipe in recipes]
    end = None if seconds is None else time.monotonic() + seconds
    for rows in sets:
        try:
            answer_sample(rows, rows.order[: rows.recipe.sample], OF_MODELS, answers, progress, end)
            if cpu_seconds:
                answer_cpu_runs(rows, answers, progress, time.monotonic() + cpu_seconds / len(sets))
        except DatasetError as error:  # a library of the models is missing, or of another version than what was measured
            warn(f"{rows.recipe.title}: {error}; the kept answers are used")
    if seconds != 0:
        for rows in sets:
            if _missing(answers, rows, SCHEDTUNE):
                _keep(answers, rows, schedtune_answers(rows))
        if not smoke:
            _answer_learned(sets, datasets, answers, progress)
    made: dict[str, tuple[RowSet, Sequence[Table]]] = {}
    agreements = {}
    for rows in sets:
        progress(f"{rows.recipe.title}: figures", 1.0)
        every = columns(rows, answers)
        made[rows.recipe.title] = (rows, tables(rows, every, answers))
        agreements[rows.recipe.title] = agreement(rows, every, answers)
    answers.write()
    return write_page(out, made, agreements, command)


def _answer_learned(
    sets: Sequence[RowSet], datasets: Path, answers: KeptAnswers, progress: Progress
) -> None:
    """Train estimators on the folds of every set for which an answer is not kept."""
    missing = [rows for rows in sets if any(_missing(answers, rows, name) for name in LEARNED)]
    real = [rows for rows in missing if rows.recipe.is_real]
    if real:
        for name, found in real_answers(real, datasets, progress).items():
            _keep(answers, next(rows for rows in real if rows.recipe.name == name), found)
        answers.write()
    for rows in missing:
        if not rows.recipe.is_real:
            _keep(answers, rows, sampled_answers(rows, datasets, progress))
            answers.write()


def _missing(answers: KeptAnswers, rows: RowSet, name: str) -> bool:
    return not answers.of(rows.recipe.name, rows.sha256, name)


def _keep(answers: KeptAnswers, rows: RowSet, found: Found) -> None:
    for name, given in found.items():
        answers.keep(rows.recipe.name, rows.sha256, name, given)
