"""Judges estimators on runs of real networks, by five folds over architecture families.

Every estimator answers from layers alone, and no row of the family that it answers for was in its
training.  What is compared is
the whole reading, with the CUDA context: one constant for each GPU and source
(:func:`models.training.data.above_context_bytes`).
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from gpumemnet.job.measurement import Measurement
from gpumemnet.predict.bundle import GRAPH_OUTPUTS
from gpumemnet.predict.features import FEATURE_NAMES
from gpumemnet.units import GIB, MIB
from models.line_calibration import RealNetworks, fit, networks_of_runs
from models.networks.mlp import float_tensor
from models.networks.physics_line import LAYER_TERMS, fit_line
from models.training.data import (
    LabelledJobs,
    folds,
    load_labelled_jobs,
    real_rows,
    with_real_networks,
)
from models.training.mlp import mlp_plan, train_classifier

FOLDS: Final = 5
COVERAGE: Final = 0.99
_RESAMPLES: Final = 1_000
SHIPPED: Final = "closed form, as shipped"
"""What the bundles of CNNs and transformers answer with
(:mod:`gpumemnet.predict.calibrated_line`)."""
_SEGMENT: Final = FEATURE_NAMES.index("segment_bytes")

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Amounts:
    """What one estimator answers for ``B`` rows: expectation, and bound for :data:`COVERAGE` (NaN
    without one), shape ``[B]``."""

    expected_bytes: Array
    bound_bytes: Array


def held_out_answers(
    data: LabelledJobs, networks: RealNetworks, seed: int, progress: Callable[[str, float], None]
) -> dict[str, Amounts]:
    """Answer for the real rows of ``data``, the last ones, each by estimators that have not seen
    its architecture family.

    Args:
        data: jobs of one family.
        networks: real networks of all families, on which the closed form is calibrated.
        seed: of folds and networks.
        progress: called with a step and its share.
    """
    first = int(data.calibration_rows[0])
    real = data.take(np.arange(first, len(data)))
    of_family = np.flatnonzero([job.family == data.family for job in networks.jobs])
    answers: dict[str, list[tuple[NDArray[np.int64], Array, Array]]] = {}
    for number, (training, testing) in enumerate(folds(real.groups, FOLDS, seed)):
        tested = real.take(testing)
        own = real.take(training)
        both = data.take(np.concatenate((np.arange(first), first + training)))
        held_out = np.array(data.real_families)[tested.groups - real.groups.min()]
        others = networks.take(np.flatnonzero(~np.isin(networks.families, held_out)))
        asked = networks.take(of_family[testing])
        for name, (expected, bound) in _estimators(own, both, others, tested, asked, seed).items():
            answers.setdefault(name, []).append((testing, expected, bound))
        progress(f"{data.family}: fold {number + 1} of {FOLDS}", (number + 1) / FOLDS)
    found = {}
    for name, parts in answers.items():
        rows = np.concatenate([rows for rows, _, _ in parts]).argsort()
        found[name] = Amounts(
            *(np.concatenate([part[at] for part in parts])[rows] for at in (1, 2))
        )
    return found


def _estimators(
    own: LabelledJobs,
    both: LabelledJobs,
    networks: RealNetworks,
    tested: LabelledJobs,
    asked: RealNetworks,
    seed: int,
) -> Mapping[str, tuple[Array, Array]]:
    """Return name → expectation and bound for the rows of ``tested``.

    Args:
        own: real networks to learn from.
        both: these and sampled ones.
        networks: real networks of all families to calibrate the closed form on.
        tested: the rows to answer for.
        asked: the same, as the closed form's line reads them.
        seed: of the network.
    """
    context = float(both.context_bytes or 0)
    line = fit_line(own.features, own.label_bytes, LAYER_TERMS)
    bases: dict[str, Callable[[Array], Array]] = {
        "closed form, scaled": lambda features: features[:, _SEGMENT] + context,
        "closed form, line": line.predict_bytes,
    }
    answers = {}
    for name, base in bases.items():
        errors = np.log(own.label_bytes / base(own.features))
        found = base(tested.features)
        bound = float(np.quantile(errors, COVERAGE, method="higher"))
        answers[name] = (found * np.exp(np.median(errors)), found * np.exp(bound))
    centre, bounds = fit(networks, (COVERAGE,)).amounts(asked.features)
    answers[SHIPPED] = (centre + context, bounds[:, 0] + context)
    classifier = train_classifier(both, mlp_plan(both, seed))
    level = min(bisect_left(classifier.coverages, COVERAGE), len(classifier.coverages) - 1)
    with torch.no_grad():
        amounts = (
            classifier.network(float_tensor(tested.features))[GRAPH_OUTPUTS.index("amounts")]
            .double()
            .numpy()
        )
    answers["MLP-based classifier"] = (np.exp(amounts[:, 1]), np.exp(amounts[:, 2 + level]))
    return answers


def write_report(
    datasets: Mapping[str, Path],
    runs: Sequence[Path],
    out: Path,
    seed: int,
    progress: Callable[[str, float], None],
) -> Path:
    """Judge the estimators on the real networks of every family, and write ``report.md`` into
    ``out``; returns its path.

    Args:
        datasets: family → sampled jobs that the networks learn from as well.
        runs: datasets of real runs.
        out: the folder.
        seed: of folds and networks.
        progress: called with a step and its share.

    Raises:
        DatasetError: when a dataset cannot be read or has no rows of the family.
    """
    lines = ["# Real networks, from layers alone", "", *_PREFACE, *_HEADER]
    worst: list[str] = []
    networks = networks_of_runs(runs)
    for family, dataset in datasets.items():
        data = with_real_networks(load_labelled_jobs(dataset, family), runs)
        rows = real_rows(runs, family)
        readings = np.array([row.label_bytes for row in rows], dtype=np.float64)
        constants = readings - (
            data.label_bytes[len(data) - len(rows) :] - float(data.context_bytes or 0)
        )
        families = np.array([row.split_group for row in rows])
        sources = np.array([row.provenance for row in rows])
        for name, answers in held_out_answers(data, networks, seed, progress).items():
            expected, bound = (
                amounts - float(data.context_bytes or 0) + constants
                for amounts in (answers.expected_bytes, answers.bound_bytes)
            )
            for source in sorted(set(sources.tolist())):
                chosen = sources == source
                lines.append(
                    _line(
                        family,
                        source,
                        name,
                        expected[chosen],
                        bound[chosen],
                        readings[chosen],
                        families[chosen],
                    )
                )
            if name == SHIPPED:
                worst += _worst(rows, expected, readings)
    lines += ["", "## The twenty worst rows of each family, in MiB", "", *_WORST_HEADER]
    lines += worst
    out.mkdir(parents=True, exist_ok=True)
    path = out / "report.md"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


_PREFACE: Final = (
    "`python -m research real-networks` prints what follows. Five folds over architecture families: no row of a family was in the",
    "training of the model that answers for it. Errors are those of the whole reading, CUDA context included, which is one",
    "constant for each GPU and source. *published*: readings of timm models on an A100; *traced*: jobs of real architectures",
    "over all training options. Intervals: 95 %, bootstrap over architecture families.",
    "",
)
_HEADER: Final = (
    "| family | rows | estimator | number | median error | 90th percentile | 8,000 MiB accuracy | 1 GiB accuracy "
    "| below the 99 % bound | bound over answer, median |",
    "|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
)
_WORST_HEADER: Final = (
    "| family | architecture family | network | options | reading | answer |",
    "|---|---|---|---|--:|--:|",
)
_WORST: Final = 20


def _line(
    family: str,
    source: str,
    name: str,
    expected: Array,
    bound: Array,
    readings: Array,
    families: NDArray[np.str_],
) -> str:
    errors = np.abs(expected / readings - 1.0)
    median, lowest, highest = _median_interval(errors, families)
    same = [
        np.mean((expected // width).astype(np.int64) == (readings // width).astype(np.int64))
        for width in (8_000 * MIB, GIB)
    ]
    cells = (
        f"{median:.1%} ({lowest:.1%}–{highest:.1%})",
        f"{np.quantile(errors, 0.9):.1%}",
        *(f"{share:.1%}" for share in (*same, np.mean(readings <= bound))),
        f"{np.median(bound / expected):.2f}",
    )
    return f"| {family} | {source} | {name} | {len(readings):,} | {' | '.join(cells)} |"


def _median_interval(errors: Array, families: NDArray[np.str_]) -> tuple[float, float, float]:
    """Return the median, and the ends of its 95 % interval when whole families are drawn again."""
    names, codes = np.unique(families, return_inverse=True)
    rows_of = [np.flatnonzero(codes == code) for code in range(len(names))]
    order = np.random.default_rng(0)
    medians = [
        np.median(
            errors[
                np.concatenate(
                    [rows_of[code] for code in order.integers(len(names), size=len(names))]
                )
            ]
        )
        for _ in range(_RESAMPLES)
    ]
    lowest, highest = np.quantile(medians, (0.025, 0.975)).tolist()
    return float(np.median(errors)), lowest, highest


def _worst(rows: Sequence[Measurement], expected: Array, readings: Array) -> list[str]:
    order = np.argsort(-np.abs(expected / readings - 1.0))[:_WORST]
    return [
        f"| {rows[at].job.family} | {rows[at].split_group} | {_network(rows[at])} | {_options(rows[at])} "
        f"| {readings[at] / MIB:,.0f} | {expected[at] / MIB:,.0f} |"
        for at in order.tolist()
    ]


def _network(row: Measurement) -> str:
    """Return library, model, size of an input and batch size of a row of real runs."""
    architecture = json.loads(row.architecture)
    library = architecture["library"].split()[0]
    units = {"image_size": "pixels", "length": "tokens"}
    sizes = [f"{architecture[key]} {unit}" for key, unit in units.items() if key in architecture]
    return ", ".join((f"{library}/{architecture['model']}", *sizes, f"batch {row.job.batch_size}"))


def _options(row: Measurement) -> str:
    """Return the options of a row that move memory most."""
    job, frozen = row.job, json.loads(row.options).get("frozen", "none")
    words = {
        "recomputed": job.checkpointing != "none",
        f"frozen {frozen}": frozen != "none",
        "Adafactor": job.optimizer == "adafactor",
        job.precision: True,
        "published": row.provenance == "published",
    }
    return ", ".join(word for word, holds in words.items() if holds)
