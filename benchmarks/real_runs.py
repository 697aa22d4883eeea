"""Published runs of real models against their traced parts, on architecture families that the
context constant has not seen.

``python benchmarks/real_runs.py`` prints Markdown tables for ``docs/evaluation/real_runs.md``.
What a reading holds beside the traced bytes is one constant for each GPU: the median over the
families of four folds, used on the fifth.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from gpumemnet.job.dataset import read_dataset
from gpumemnet.job.measurement import Measurement
from gpumemnet.physics.element_types import FULL_BYTES
from gpumemnet.units import MIB
from research.published_tables.xmem_models import PROTOCOL as ABOVE_CONTEXT

DATASETS: Final = Path(__file__).parents[1] / "dataset_builder" / "datasets" / "real_runs"
FILES: Final = ("published_timm_a100.parquet", "published_xmem_rtx30_40.parquet")
FOLDS: Final = 5
WORST: Final = 20
RESERVED_SHARE: Final = 0.02  # of the margin; this program finds its size
COVERAGE: Final = 0.99
WORKSPACE: Final = "largest_convolution_workspace_bytes"
PART: Final = {"steady": "steady_reserved_bytes", "startup": "startup_peak_reserved_bytes"}


def fold_of(group: str) -> int:
    """The fold of an architecture family: a hash, so rows that are added move no other row."""
    digest = hashlib.sha256(f"0:{group}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % FOLDS


def estimates(rows: Sequence[Measurement]) -> np.ndarray:
    """Expected label of each row, in bytes: the traced part of its state, and the constant of the
    other folds."""
    traced = np.array([row.traced[PART[row.label_state or "steady"]] for row in rows], dtype=float)
    labels = np.array([row.label_bytes for row in rows], dtype=float)
    folds = np.array([fold_of(row.split_group) for row in rows])
    gpus = np.array([row.gpu for row in rows])
    steady = np.array([row.label_state == "steady" for row in rows])
    expected = np.empty(len(rows))
    for gpu in set(gpus):
        for fold in range(FOLDS):
            own = (gpus == gpu) & (folds == fold)
            others = (gpus == gpu) & (folds != fold) & steady
            if own.any():
                expected[own] = traced[own] + np.median((labels - traced)[others])
    return expected


def first_reading_bytes(row: Measurement) -> int:
    """What lay on the GPU at the first reading of a CNN that was read above its context:
    parameters, and Adagrad's state.

    Published readings on an RTX 3060 suggest that the first reading, which is subtracted, was taken
    with the model and its
    optimizer in place: those of ConvNeXt lie one copy of the parameters lower than the trace, and
    two with Adagrad, the one
    optimizer whose state exists before the first step.  Readings of texts show no such difference.
    """
    if row.protocol != ABOVE_CONTEXT or json.loads(row.architecture)["library"] != "torchvision":
        return 0
    return (2 if row.job.optimizer == "adagrad" else 1) * row.job.total_parameters * FULL_BYTES


def above_context_table(rows: Sequence[Measurement]) -> None:
    """Print errors by GPU and kind of network, of the readings as they are and with
    :func:`first_reading_bytes` added."""
    added = [
        replace(row, peak_device_bytes=(row.label_bytes or 0) + first_reading_bytes(row))
        for row in rows
    ]
    errors = []
    for variant in (rows, added):
        labels = np.array([row.label_bytes for row in variant], dtype=float)
        errors.append(abs(estimates(variant) - labels) / labels)
    kinds = [(row.gpu, json.loads(row.architecture)["library"]) for row in rows]
    print(
        "| GPU, library | rows | as read: median / 90th percentile | with what lay on the GPU at the first reading |",
        "|---|---:|---:|---:|",
        sep="\n",
    )
    for kind in sorted(set(kinds)):
        own = [index for index, each in enumerate(kinds) if each == kind]
        cells = [
            f"{np.median(each[own]):.1%} / {np.quantile(each[own], 0.9):.1%}" for each in errors
        ]
        print(f"| {', '.join(kind)} | {len(own)} | {cells[0]} | {cells[1]} |")
    print()


def table(
    title: str,
    rows: Sequence[Measurement],
    expected: np.ndarray,
    group: Callable[[Measurement], str],
) -> None:
    """Print one line for each group, most rows first."""
    labels = np.array([row.label_bytes for row in rows], dtype=float)
    errors = (expected - labels) / labels
    groups: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[group(row)].append(index)
    print(
        f"| {title} | rows | median error | 90th percentile | median, signed | reading above |\n|---|---:|---:|---:|---:|---:|"
    )
    for name, indices in sorted(groups.items(), key=lambda pair: (-len(pair[1]), pair[0])):
        own = errors[indices]
        sizes = f"{np.median(abs(own)):.1%} | {np.quantile(abs(own), 0.9):.1%} | {np.median(own):+.1%} | {np.mean(own < 0):.0%}"
        print(f"| {name} | {len(own):,} | {sizes} |")
    print()


def bounds(rows: Sequence[Measurement], expected: np.ndarray) -> np.ndarray:
    """Upper bound of each row in bytes: the margin of the trace's safe bytes, its size from the
    other folds.

    The margin is a multiple of the largest convolution workspace and a fiftieth of the reserved
    bytes; the multiple is that below which 99 % of the readings of the other folds lie.
    """
    reserved = np.array([row.traced[PART["steady"]] for row in rows], dtype=float)
    scale = RESERVED_SHARE * reserved + np.array(
        [row.traced[WORKSPACE] for row in rows], dtype=float
    )
    needed = (np.array([row.label_bytes for row in rows], dtype=float) - expected) / scale
    folds = np.array([fold_of(row.split_group) for row in rows])
    multiples = np.array([np.quantile(needed[folds != fold], COVERAGE) for fold in range(FOLDS)])
    upper: np.ndarray = expected + multiples[folds] * scale
    return upper


def bound_table(rows: Sequence[Measurement], expected: np.ndarray) -> None:
    """Print how often readings of each GPU lie above the bound, and how far the bound lies above
    them."""
    labels = np.array([row.label_bytes for row in rows], dtype=float)
    steady = np.array([row.label_state == "steady" for row in rows])
    gpus = np.array([row.gpu for row in rows])
    print(
        "| GPU, steady readings | rows | above the 99 % bound | over-allocation, median | 90th percentile |",
        "|---|---:|---:|---:|---:|",
        sep="\n",
    )
    for gpu in sorted(set(gpus)):
        own = np.flatnonzero(steady & (gpus == gpu))
        upper = bounds([rows[index] for index in own.tolist()], expected[own])
        over = upper / labels[own] - 1
        print(
            f"| {gpu} | {len(own):,} | {np.mean(over < 0):.2%} | {np.median(over):.1%} | {np.quantile(over, 0.9):.1%} |"
        )
    print()


def search_table(rows: Sequence[Measurement], expected: np.ndarray) -> None:
    """Print how far steady state and traced peak are off readings that caught cuDNN's search."""
    own = np.flatnonzero([row.label_state == "startup" for row in rows])
    if not len(own):
        return
    caught = [rows[index] for index in own.tolist()]
    labels = np.array([row.label_bytes for row in caught], dtype=float)
    searched = np.array(
        [row.traced[PART["startup"]] - row.traced[PART["steady"]] for row in caught]
    )
    print(
        f"| {len(own)} readings of a search: answered by | median error | 90th percentile | too low |",
        "|---|---:|---:|---:|",
        sep="\n",
    )
    for name, answers in (
        ("the steady state", expected[own] - searched),
        ("the traced peak with transforms of cuDNN 9.1", expected[own]),
    ):
        ratios = answers / labels
        errors = np.abs(ratios - 1)
        print(
            f"| {name} | {np.median(errors):.1%} | {np.quantile(errors, 0.9):.1%} | {np.mean(ratios < 1):.0%} |"
        )
    print()


def worst(rows: Sequence[Measurement], expected: np.ndarray, count: int) -> None:
    """Print the ``count`` steady readings that are furthest from their estimates."""
    labels = np.array([row.label_bytes for row in rows], dtype=float)
    errors = (expected - labels) / labels
    steady = [index for index, row in enumerate(rows) if row.label_state == "steady"]
    for index in sorted(steady, key=lambda index: -abs(errors[index]))[:count]:
        row = rows[index]
        reading, estimate, peak = (
            x / MIB for x in (labels[index], expected[index], row.traced[PART["startup"]])
        )
        print(
            f"* {json.loads(row.architecture)['model']}, batch {row.job.batch_size}: read {reading:,.0f} MiB, "
            f"estimated {estimate:,.0f} ({errors[index]:+.0%}); peak of the start-up {peak:,.0f} above the context"
        )
    print()


def main() -> None:
    """Print the tables."""
    for name in FILES:
        rows = read_dataset(DATASETS / name)
        used = [row for row in rows if row.label_bytes is not None and row.traced]
        expected = estimates(used)
        kinds = ", ".join(
            f"{sum(row.status == kind for row in rows):,} {kind}" for kind in ("ok", "oom", "error")
        )
        print(
            f"`{name}`: {len(rows):,} rows ({kinds}), {len(used):,} of them ok and with traced parts\n"
        )
        table(
            "GPU, state of the reading", used, expected, lambda row: f"{row.gpu}, {row.label_state}"
        )
        bound_table(used, expected)
        search_table(used, expected)
        if any(row.protocol == ABOVE_CONTEXT for row in used):
            above_context_table(used)
        table("family", used, expected, lambda row: row.architecture_family or "")
        worst(used, expected, WORST)


if __name__ == "__main__":
    main()
