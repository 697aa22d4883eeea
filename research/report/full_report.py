"""The full report: every candidate on every dataset of a folder and on real models, and an ablation
of our classifiers.

Measured and published rows give tables of accuracy, traced rows give tables of agreement with the
trace, and real models are used for testing only.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from gpumemnet.errors import DatasetError
from gpumemnet.gpu import context, device_profile
from gpumemnet.job.measurement import TRACED, Measurement
from gpumemnet.predict.bundle import Bundle
from gpumemnet.units import GIB, MIB
from models.evaluation import Answers, calibrated_physics
from models.training.classifier import save_classifier
from models.training.data import ZOO, LabelledJobs, joined, labelled_jobs, load_training_rows
from models.training.mlp import common_plan, mlp_plan, train_classifier
from models.training.sequence import train_sequence_classifier, transformer_plan
from research.report import write_report
from research.report.figures import Section

from .candidates import (
    COMMON,
    COMMON_TRANSFERRED,
    MLP_BASED,
    ONE_GIB,
    PAPER_MLP,
    SCHEMES,
    SOFTMAX_HEAD,
    TOTALS_ONLY,
    TRACED_PEAK,
    TRANSFERRED,
    TRANSFORMER_BASED,
    TWO_MEMBERS,
    CommonNetwork,
    Plans,
    on_gpu,
    served_answers,
    traced_peak_answers,
)
from .study import (
    Progress,
    Study,
    measured_study,
    run_studies,
    traced_study,
)

SMOKE_ROWS: Final = 200
SMOKE_EPOCHS: Final = 2
SMALL_JOBS: Final = 40 * GIB
"""Accuracies are of jobs up to this size, as the project's targets are."""
PUBLISHED_VALUES: Final = {
    "fake_tensor_mib": "FakeTensor",
    "horus_mib": "Horus, published",
    "gpumemnet_mib": "GPUMemNet, published",
}


@dataclass(frozen=True, slots=True, eq=False)
class _Sources:
    """The datasets of a folder: labelled jobs by family, and the rows of real models."""

    measured: dict[str, LabelledJobs]
    traced: dict[str, LabelledJobs]
    zoo: dict[str, tuple[LabelledJobs, list[Measurement]]]


def write_full_report(
    datasets: Path,
    out: Path,
    *,
    seed: int,
    workers: int | None,
    is_smoke: bool,
    progress: Progress = lambda what, share: None,
) -> list[Path]:
    """Write the report on all datasets in the folder ``datasets`` to ``out``.

    Raises:
        DatasetError: when the folder holds no dataset, or one that cannot be read.
        ValueError: when a dataset has too few architectures to split.
    """
    start = time.monotonic()
    sources = _sources(datasets, is_smoke)
    all_traced = list(sources.traced.values())
    several = len(all_traced) > 1
    if is_smoke:  # one measured family, and the real models' family
        sources = _Sources(_first(sources.measured), _first(sources.traced), sources.zoo)
    epochs = SMOKE_EPOCHS if is_smoke else None
    with tempfile.TemporaryDirectory() as scratch:
        studies, bundles, calibrations = [], {}, {}
        for family, data in sources.traced.items():
            progress(f"learning from traced {family} jobs", 0.0)
            plans = _plans(data, seed, epochs)
            calibrations[family] = sources.measured.get(family)
            bundles[family] = _bundles(data, plans, calibrations[family], Path(scratch))
            studies.append(_shortened(traced_study(data, plans), is_smoke))
        common = None
        if several:
            progress("learning from traced jobs of all families", 0.0)
            common = _common_bundle(joined(all_traced), seed, epochs, Path(scratch))
        for family, data in sources.measured.items():
            traced = {TRANSFERRED: bundles[family][0]} if family in bundles else {}
            if common is not None and family in common.card.families:
                traced[COMMON_TRANSFERRED] = common
            studies.append(
                _shortened(measured_study(data, _plans(data, seed, epochs), traced), is_smoke)
            )
        studies.sort(key=lambda study: (study.data.provenance == TRACED, study.slug))
        networks = (
            [CommonNetwork(COMMON, common_plan(seed, epochs), tuple(all_traced))] if several else []
        )
        sections = run_studies(studies, progress, workers, networks)
        zoo = [
            _zoo_section(family, *rows, bundles[family], common, sources.measured.get(family))
            for family, rows in sources.zoo.items()
            if family in bundles
        ]
    minutes = (time.monotonic() - start) / 60
    notes = [
        f"Training and judging took {minutes:.1f} minutes with {workers or os.cpu_count()} processes, seed {seed}."
    ]
    if is_smoke:
        notes.insert(0, "A smoke run on few rows: its figures say nothing.")
    return write_report(
        [*sections, *zoo],
        out,
        notes=notes,
        appendix=_ablation_parts(sections),
    )


def _sources(folder: Path, is_smoke: bool) -> _Sources:
    paths = sorted(folder.glob("*.parquet")) if folder.is_dir() else []
    if not paths:
        raise DatasetError(f"{folder} holds no dataset (*.parquet): give --datasets")
    sources = _Sources({}, {}, {})
    for path in paths:
        rows = load_training_rows(path)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        for family, is_zoo in sorted({(row.job.family, row.recipe == ZOO) for row in rows}):
            family_rows = [
                row for row in rows if row.job.family == family and (row.recipe == ZOO) == is_zoo
            ]
            data = labelled_jobs(
                family_rows if is_zoo or not is_smoke else family_rows[:SMOKE_ROWS],
                str(path),
                sha256,
            )
            if is_zoo:
                sources.zoo[family] = (data, family_rows)
                continue
            kept = sources.traced if data.provenance == TRACED else sources.measured
            if family in kept:
                raise DatasetError(
                    f"{path} holds {family} jobs that another dataset of {folder} has too: merge them first"
                )
            kept[family] = data
    return sources


def _first(by_family: dict[str, LabelledJobs]) -> dict[str, LabelledJobs]:
    return dict(sorted(by_family.items())[:1])


def _plans(data: LabelledJobs, seed: int, epochs: int | None) -> Plans:
    plans = Plans(mlp_plan(data, seed, epochs), transformer_plan(seed, epochs))
    return plans if epochs is None else replace(plans, paper_epochs=4 * epochs)


def _common_bundle(data: LabelledJobs, seed: int, epochs: int | None, scratch: Path) -> Bundle:
    """One model for all families, trained on all of ``data``."""
    plan = common_plan(seed, epochs)
    return save_classifier(
        scratch / "all-mlp", train_classifier(data, plan), data, plan, name="all-mlp", version="0"
    )


def _shortened(study: Study, is_smoke: bool) -> Study:
    return (
        replace(study, fold_count=2 if len(study.data) >= SMOKE_ROWS else 4) if is_smoke else study
    )


def _bundles(
    data: LabelledJobs, plans: Plans, calibration: LabelledJobs | None, scratch: Path
) -> tuple[Bundle, Bundle]:
    """Both encoders, trained on all of ``data``."""
    family = data.jobs[0].family
    first = train_classifier(data, plans.mlp)
    second = train_sequence_classifier(data, plans.transformer)
    return (
        save_classifier(
            scratch / f"{family}-mlp",
            first,
            data,
            plans.mlp,
            name=f"{family}-mlp",
            version="0",
            traces=calibration,
        ),
        save_classifier(
            scratch / f"{family}-t",
            second,
            data,
            plans.transformer,
            name=f"{family}-t",
            version="0",
        ),
    )


def _zoo_section(
    family: str,
    data: LabelledJobs,
    rows: Sequence[Measurement],
    bundles: tuple[Bundle, Bundle],
    common: Bundle | None,
    measured: LabelledJobs | None,
) -> Section:
    """The section of real models, which no classifier was trained on, with the context of the GPU's
    profile."""
    answers = {
        name: served_answers(bundle, data, data.gpu)
        for name, bundle in zip((MLP_BASED, TRANSFORMER_BASED), bundles, strict=True)
    }
    if common is not None:
        answers[COMMON] = served_answers(common, data, data.gpu)
    gpu_context = context(device_profile(data.gpu))
    if measured is not None:
        physics = calibrated_physics(measured)(on_gpu(data, data.gpu))
        answers["calibrated physics, published jobs"] = _answers_without_bound(physics)
        calibrated = traced_peak_answers(measured, data, gpu_context.expected_bytes)
        if calibrated is not None:
            answers[TRACED_PEAK] = calibrated
    options = [json.loads(row.options) for row in rows]
    names = [json.loads(row.architecture)["model"] for row in rows]
    return Section(
        slug=f"zoo-{family}",
        title=f"Real {family} models, never trained on",
        about=f"{len(data)} published readings of real models on {data.gpu}. The classifiers learned from traces of sampled "
        f"networks on another GPU. The CUDA context is that of the GPU's profile, {gpu_context.expected_bytes / MIB:,.0f} MiB: "
        f"{gpu_context.source.partition(':')[0]}.",
        is_measured=True,
        jobs=data.jobs,
        features=data.features,
        label_bytes=data.label_bytes,
        folds=np.zeros(len(data), dtype=np.int64),
        answers=answers,
        candidate=MLP_BASED,
        others_mib={
            title: np.array(
                [row_options.get(field) or np.nan for row_options in options], dtype=np.float64
            )
            for field, title in PUBLISHED_VALUES.items()
        },
        names=tuple(names),
    )


def _answers_without_bound(expected: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Answers:
    """Answers without a bound."""
    return Answers(
        expected,
        np.full(len(expected), np.nan),
        {scheme.name: scheme.index(expected) for scheme in SCHEMES},
    )


_ABLATION: Final = {
    MLP_BASED: "all of it",
    TWO_MEMBERS: "two members instead of five",
    SOFTMAX_HEAD: "a softmax over bins instead of the distribution, one network for each width",
    TOTALS_ONLY: "without the layer list: no closed form",
    PAPER_MLP: "GPUMemNet's features and its softmax",
    TRANSFORMER_BASED: "with attention over the layers",
    COMMON: "one model for all families",
    TRACED_PEAK: "the traced peak instead of all of it",
}


def _ablation_parts(sections: Sequence[Section]) -> list[str]:
    """The ablation of the MLP-based classifier, as Markdown."""
    parts = []
    for section in sections:
        lines = [
            f"### What each part is worth: {section.slug}",
            "",
            "| | 1 GiB accuracy | 8,000 MiB | error median | within 10 % |",
        ]
        lines.append("| --- | ---: | ---: | ---: | ---: |")
        for name, description in _ABLATION.items():
            if name not in section.answers:
                continue
            answers, labels = section.answers[name], section.label_bytes
            errors, is_small = np.abs(answers.expected_bytes / labels - 1.0), labels <= SMALL_JOBS
            right = [
                np.mean(
                    (
                        answers.bins.get(scheme.name, scheme.index(answers.expected_bytes))
                        == scheme.index(labels)
                    )[is_small]
                )
                for scheme in (ONE_GIB, SCHEMES[-1])
            ]
            cells = (
                f"{right[0]:.1%}",
                f"{right[1]:.1%}",
                f"{np.median(errors):.1%}",
                f"{(errors <= 0.1).mean():.1%}",
            )
            lines.append(f"| {description} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return parts
