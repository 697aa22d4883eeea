"""Runs candidates over folds and gathers the sections of the report; folds run side by side in processes of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from gpumemnet.predict.bundle import Bundle
from gpumemnet.sandbox.worker_pool import worker_pool

from ..answers import Answers, concatenated
from ..training.data import LabelledJobs
from ..training.splits import folds
from .candidates import (
    COMMON,
    MEASURED_CANDIDATES,
    MLP_BASED,
    TRACED_CANDIDATES,
    Candidate,
    Plans,
    common_answers,
    transferred,
)
from .section import Section

Progress = Callable[[str, float], None]
MEASURED_FOLDS: Final = 5
TRACED_FOLDS: Final = 3
"""Fewer than for measured data: agreement with a trace matters less than agreement with a GPU."""


@dataclass(frozen=True, slots=True, eq=False)
class Study:
    """One dataset to be split, trained and tested on.

    Attributes:
        slug, title, about: of the study's section.
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
        f"{len(data):,} {family} jobs measured on {data.gpu} ({data.provenance}, {data.label_source}), of which {oom:,} ran out "
        f"of memory: trained on as censored labels, not judged. {MEASURED_FOLDS} folds split by architecture; every model is "
        "trained anew in each and judged on the jobs held out."
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
        f"{len(data):,} {family} jobs drawn from the recipe and traced as on {data.gpu}; no GPU has run them, so this says how "
        f"well a feature vector stands in for a trace, and nothing more. {TRACED_FOLDS} folds split by architecture."
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
    studies: Sequence[Study], progress: Progress, workers: int | None = None, families: Sequence[LabelledJobs] = ()
) -> list[Section]:
    """The sections of ``studies``, in their order.

    Args:
        studies: the studies.
        progress: called with the finished step and the finished share.
        workers: processes; one for each core unless given.
        families: datasets on which one common model is trained; it is a candidate in the studies of these datasets.

    Raises:
        ValueError: when a dataset has fewer architectures than folds.
    """
    workers = workers or min(os.cpu_count() or 1, sum(study.fold_count for study in studies))
    tasks = [(study, fold) for study in studies for fold in range(study.fold_count)]
    for study in studies:
        folds(study.data.groups, study.fold_count, study.plans.mlp.seed)
    common = [study for study in studies if any(study.data is data for data in families)] if len(families) > 1 else []
    finished: list[_Fold] = []
    # the longest first, so that no core is idle while a long task ends
    tasks.sort(key=lambda task: -len(task[0].data))
    with worker_pool(workers, _use_one_thread) as pool:
        folds_of_all = range(common[0].fold_count if common else 0)
        common_results = [pool.submit(_run_common, common, families, fold) for fold in folds_of_all]
        fold_results = [pool.submit(_run_fold, study, fold) for study, fold in tasks]
        for future in as_completed(fold_results):
            finished.append(future.result())
            progress(f"{finished[-1].slug}, fold {finished[-1].fold + 1}", len(finished) / len(tasks))
        for fold, result in enumerate(common_results):
            answers, seconds = result.result()
            for fold_answers in finished:
                if fold_answers.fold == fold and fold_answers.slug in answers:
                    fold_answers.answers[COMMON] = answers[fold_answers.slug]
                    fold_answers.seconds[COMMON] = seconds
    return [
        _section(study, sorted((result for result in finished if result.slug == study.slug), key=lambda result: result.fold))
        for study in studies
    ]


def _use_one_thread() -> None:
    """Limit scikit-learn's trees to one thread: the other processes occupy the other cores."""
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)


def _run_fold(study: Study, fold: int) -> _Fold:
    training_rows, test_rows = folds(study.data.groups, study.fold_count, study.plans.mlp.seed)[fold]
    test_rows = test_rows[~np.isnan(study.data.label_bytes[test_rows])]
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
    return _Fold(study.slug, fold, test_rows, answers, seconds)


def _run_common(studies: Sequence[Study], families: Sequence[LabelledJobs], fold: int) -> tuple[dict[str, Answers], float]:
    """The answers of one model for all ``families`` in each of ``studies``, by slug, and the seconds of each.

    A family is split as its study splits it, so that the jobs held out there are held out here.
    """
    start = time.monotonic()
    first = studies[0]
    parts = [(data, *folds(data.groups, first.fold_count, first.plans.mlp.seed)[fold]) for data in families]
    tests = {}
    for study in studies:
        _, rows = folds(study.data.groups, study.fold_count, study.plans.mlp.seed)[fold]
        tests[study.slug] = study.data.take(rows[~np.isnan(study.data.label_bytes[rows])])
    answers = common_answers([data.take(rows) for data, rows, _ in parts], list(tests.values()), first.plans.common)
    return dict(zip(tests, answers, strict=True)), (time.monotonic() - start) / len(tests)


def _section(study: Study, parts: Sequence[_Fold]) -> Section:
    rows = np.concatenate([part.test_rows for part in parts])
    tested = study.data.take(rows)
    names = [name for name in parts[0].answers if all(name in part.answers for part in parts)]
    return Section(
        slug=study.slug,
        title=study.title,
        about=study.about,
        is_measured=study.data.provenance != "traced",
        jobs=tested.jobs,
        features=tested.features,
        label_bytes=tested.label_bytes,
        folds=np.concatenate([np.full(len(part.test_rows), part.fold) for part in parts]),
        answers={name: concatenated([part.answers[name] for part in parts]) for name in names},
        candidate=study.candidate,
        seconds={name: sum(part.seconds.get(name, 0.0) for part in parts) for name in names},
    )
