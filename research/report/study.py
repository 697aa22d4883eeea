"""Runs candidates over folds and gathers the sections of the report; folds run side by side in
processes of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from gpumemnet.predict.bundle import Bundle
from gpumemnet.sandbox.workers import worker_pool
from models.evaluation import Answers, concatenated
from models.training.data import LabelledJobs, Rows, folds
from research.report.figures import Section

from .candidates import (
    MEASURED_CANDIDATES,
    MLP_BASED,
    TOTALS_SUFFIX,
    TRACED_CANDIDATES,
    Candidate,
    CommonNetwork,
    Plans,
    common_answers,
    transferred,
)

Progress = Callable[[str, float], None]
MEASURED_FOLDS: Final = 5
TRACED_FOLDS: Final = 3
"""Fewer than for measured data: agreement with a trace matters less than agreement with a GPU."""


@dataclass(frozen=True, slots=True, eq=False)
class Study:
    """One dataset to be split, trained and tested on.

    Attributes:
        slug, title, about: of the study's section; the section adds a sentence on the folds.
        data: the rows.
        candidates: the candidates to compare.
        fold_count: number of folds, split by architecture.
        plans: training plans of the classifiers.
        traced: name of a candidate → bundle trained on traces on another GPU.
        candidate: the candidate that the pictures show.
    """

    slug: str
    title: str
    about: str
    data: LabelledJobs
    candidates: tuple[Candidate, ...]
    fold_count: int
    plans: Plans
    traced: Mapping[str, Bundle] = field(default_factory=dict)
    candidate: str = MLP_BASED


@dataclass(frozen=True, slots=True, eq=False)
class _Fold:
    slug: str
    fold: int
    test_rows: np.ndarray[tuple[int], np.dtype[np.int64]]
    answers: dict[str, Answers]
    seconds: dict[str, float]


def measured_study(data: LabelledJobs, plans: Plans, traced: Mapping[str, Bundle]) -> Study:
    """The study of a dataset with readings of a GPU."""
    family = data.jobs[0].family
    oom = int(np.isnan(data.label_bytes).sum())
    about = (
        f"{len(data):,} {family} jobs measured on {data.gpu} ({data.provenance}, {data.label_source}). Of these {oom:,} ran out "
        "of memory: they are trained on as censored labels, and not judged."
    )
    return Study(
        slug=f"measured-{family}",
        title=f"{family} jobs, measured",
        about=about,
        data=data,
        candidates=MEASURED_CANDIDATES,
        fold_count=MEASURED_FOLDS,
        plans=plans,
        traced=traced,
    )


def traced_study(data: LabelledJobs, plans: Plans) -> Study:
    """The study of a dataset whose labels come from the trace."""
    family = data.jobs[0].family
    about = (
        f"{len(data):,} {family} jobs drawn from the recipe and traced as on {data.gpu}. No GPU has run them, so this says how "
        "well a feature vector stands in for a trace, and nothing more."
    )
    return Study(
        slug=f"traced-{family}",
        title=f"{family} jobs, traced labels",
        about=about,
        data=data,
        candidates=TRACED_CANDIDATES,
        fold_count=TRACED_FOLDS,
        plans=plans,
    )


def run_studies(
    studies: Sequence[Study],
    progress: Progress,
    workers: int | None = None,
    networks: Sequence[CommonNetwork] = (),
) -> list[Section]:
    """The sections of ``studies``, in their order.

    Args:
        studies: the studies.
        progress: called with the finished step and the finished share.
        workers: processes; one for each core unless given.
        networks: networks that several datasets have in common; candidates in the studies of these
            datasets, which have equally many folds.

    Raises:
        ValueError: when a dataset has fewer architectures than folds.
    """
    tasks = [(study, fold) for study in studies for fold in range(study.fold_count)]
    for study in studies:
        folds(study.data.groups, study.fold_count, study.plans.mlp.seed)
    concerned = [
        [study for study in studies if any(study.data is data for data in network.datasets)]
        for network in networks
    ]
    common_tasks = [
        (network, own, fold)
        for network, own in zip(networks, concerned, strict=True)
        for fold in range(own[0].fold_count)
    ]
    workers = workers or min(os.cpu_count() or 1, len(tasks) + len(common_tasks))
    # the longest first, so that no core is idle while a long task ends
    tasks.sort(key=lambda task: -len(task[0].data))
    with worker_pool(workers, _use_one_thread) as pool:
        common_results = [pool.submit(_run_common, *task) for task in common_tasks]
        results = [*(pool.submit(_run_fold, *task) for task in tasks), *common_results]
        for done, future in enumerate(as_completed(results), 1):
            last = future.result()[-1]
            progress(f"{last.slug}, fold {last.fold + 1}", done / len(results))
        finished = [part for future in results for part in future.result()]
    return [
        _section(study, [_merged(finished, study, fold) for fold in range(study.fold_count)])
        for study in studies
    ]


def _merged(finished: Sequence[_Fold], study: Study, fold: int) -> _Fold:
    """Return all candidates of one fold of a study together."""
    parts = [part for part in finished if (part.slug, part.fold) == (study.slug, fold)]
    answers = {name: answer for part in parts for name, answer in part.answers.items()}
    return replace(
        parts[0],
        answers=answers,
        seconds={name: took for part in parts for name, took in part.seconds.items()},
    )


def _use_one_thread() -> None:
    """Limit scikit-learn's trees to one thread: the other processes occupy the other cores."""
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)


def _fold_rows(study: Study, fold: int) -> tuple[Rows, Rows]:
    """Return the rows to train on, and those to test on, which have a label."""
    training_rows, test_rows = folds(study.data.groups, study.fold_count, study.plans.mlp.seed)[
        fold
    ]
    return training_rows, test_rows[~np.isnan(study.data.label_bytes[test_rows])]


def _run_fold(study: Study, fold: int) -> list[_Fold]:
    training_rows, test_rows = _fold_rows(study, fold)
    training, test = study.data.take(training_rows), study.data.take(test_rows)
    answers: dict[str, Answers] = {}
    seconds: dict[str, float] = {}
    for candidate in study.candidates:
        start = time.monotonic()
        answers_by_name = candidate(training, test, study.plans)
        for name, answer in answers_by_name.items():
            answers[name] = answer
            seconds[name] = (time.monotonic() - start) / len(answers_by_name)
    for name, bundle in study.traced.items():
        answers[name] = transferred(bundle, training, test)
    return [_Fold(study.slug, fold, test_rows, answers, seconds)]


def _run_common(network: CommonNetwork, studies: Sequence[Study], fold: int) -> list[_Fold]:
    """The answers of a common network in each of ``studies``.

    A dataset is split as its study splits it, so that the jobs held out there are held out here.
    """
    start = time.monotonic()
    count, seed = studies[0].fold_count, studies[0].plans.mlp.seed
    training = [data.take(folds(data.groups, count, seed)[fold][0]) for data in network.datasets]
    rows = [_fold_rows(study, fold)[1] for study in studies]
    tests = [study.data.take(own) for study, own in zip(studies, rows, strict=True)]
    found = common_answers(network.plan, training, tests)
    seconds = (time.monotonic() - start) / sum(map(len, found))
    names = (network.name, f"{network.name}{TOTALS_SUFFIX}")
    return [
        _Fold(
            study.slug,
            fold,
            own,
            dict(zip(names, answers, strict=False)),
            dict.fromkeys(names[: len(answers)], seconds),
        )
        for study, own, answers in zip(studies, rows, found, strict=True)
    ]


def _section(study: Study, parts: Sequence[_Fold]) -> Section:
    rows = np.concatenate([part.test_rows for part in parts])
    tested = study.data.take(rows)
    names = [name for name in parts[0].answers if all(name in part.answers for part in parts)]
    return Section(
        slug=study.slug,
        title=study.title,
        about=f"{study.about} {study.fold_count} folds are split by architecture. Every model is trained anew in each, and "
        "judged on the jobs held out.",
        is_measured=study.data.provenance != "traced",
        jobs=tested.jobs,
        features=tested.features,
        label_bytes=tested.label_bytes,
        folds=np.concatenate([np.full(len(part.test_rows), part.fold) for part in parts]),
        answers={name: concatenated([part.answers[name] for part in parts]) for name in names},
        candidate=study.candidate,
        seconds={name: sum(part.seconds.get(name, 0.0) for part in parts) for name in names},
    )
