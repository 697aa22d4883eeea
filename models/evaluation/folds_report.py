"""Writes an evaluation: a table in Markdown and JSON, and confusion matrices as pictures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from gpumemnet.predict.features import FEATURE_SCHEMA

from .folds import CLASSIFIER, SCHEMES, Evaluation
from .metrics import confusion

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gpumemnet.predict.distribution import BinScheme

_HEADINGS: Final = (
    *("candidate", "accuracy 1,000 MiB", "accuracy 2,000 MiB", "macro F1 1,000", "macro F1 2,000"),
    *(
        "bin too low 1,000",
        "bin too low 2,000",
        "error median MiB",
        "error p90 MiB",
        "error p99 MiB",
    ),
    *("above safe", "wasted", "no safe bytes"),
)


def markdown_table(evaluation: Evaluation) -> str:
    """The table of all candidates, one row each."""
    rows = []
    for candidate in evaluation.answers:
        bins = [evaluation.bin_figures(candidate, scheme) for scheme in SCHEMES]
        amounts = evaluation.amount_figures(candidate)
        rows.append(
            [
                candidate,
                *(f"{figures.accuracy:.4f}" for figures in bins),
                *(f"{figures.macro_f1:.4f}" for figures in bins),
                *(f"{figures.under_predicted:.2%}" for figures in bins),
                *(
                    f"{error:.1f}"
                    for error in (
                        amounts.median_error_mib,
                        amounts.p90_error_mib,
                        amounts.p99_error_mib,
                    )
                ),
                f"{amounts.above_safe:.2%}",
                f"{amounts.wasted:.2%}",
                f"{amounts.without_safe:.2%}",
            ]
        )
    lines = [_HEADINGS, ("---", *["---:"] * (len(_HEADINGS) - 1)), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def heading(evaluation: Evaluation) -> str:
    """One paragraph that says on what, and how, the table was measured."""
    data = evaluation.data
    return (
        f"{len(evaluation.label_bytes):,} {data.jobs[0].family} jobs on {data.gpu} ({data.provenance}, {data.label_source}), "
        f"{evaluation.folds} folds split by architecture, seed {evaluation.plan.seed}. Every model is trained anew in each fold "
        "and judged on the jobs held out, pooled. 'Bin too low' is the share of jobs whose bin was under-predicted. 'Above safe' "
        "is the share above the safe bytes at 99 % coverage. 'Wasted' is the mean of safe over measured, less one. 'No safe "
        "bytes' is the share that a candidate refuses to bound, because it lies outside its training ranges. Jobs that ran out "
        f"of memory are trained on but not judged ({int(np.isnan(data.label_bytes).sum()):,} of {len(data):,}).\n"
    )


def write_report(evaluation: Evaluation, folder: str | Path) -> list[Path]:
    """Write ``evaluation.md``, ``evaluation.json`` and ``confusion.png`` into ``folder``; returns
    the paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "data_sha256": evaluation.data.sha256,
        "gpu": evaluation.data.gpu,
        "provenance": evaluation.data.provenance,
        "jobs": len(evaluation.label_bytes),
        "folds": evaluation.folds,
        "feature_schema": FEATURE_SCHEMA,
        "plan": asdict(evaluation.plan),
        "candidates": evaluation.rows(),
    }
    paths = [folder / name for name in ("evaluation.md", "evaluation.json", "confusion.png")]
    paths[0].write_text(
        f"# Evaluation\n\n{heading(evaluation)}\n{markdown_table(evaluation)}", "utf-8"
    )
    paths[1].write_text(json.dumps(document, indent=2) + "\n", "utf-8")
    confusion_figure(evaluation).savefig(paths[2], dpi=150)
    return paths


def confusion_figure(evaluation: Evaluation, candidate: str = CLASSIFIER) -> Figure:
    """Measured against predicted bins of one candidate, one panel per bin scheme, counts written
    into the cells."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(SCHEMES), 4.6), layout="constrained")
    for axes, scheme in zip(
        figure.subplots(1, len(SCHEMES), squeeze=False)[0], SCHEMES, strict=True
    ):
        counts = confusion(
            evaluation.label_bytes, evaluation.answers[candidate].bins[scheme.name], scheme
        )
        axes.imshow(counts, cmap="Blues", norm=LogNorm(vmin=0.5, vmax=max(counts.max(), 1)))
        for row, column in zip(*counts.nonzero(), strict=True):
            dark = counts[row, column] > counts.max() ** 0.5
            axes.text(
                column,
                row,
                f"{counts[row, column]:,}",
                ha="center",
                va="center",
                color="white" if dark else "black",
            )
        labels = [_bin_label(scheme, index) for index in range(len(counts))]
        axes.set_xticks(range(len(counts)), labels)
        axes.set_yticks(range(len(counts)), labels)
        axes.set(xlabel="predicted bin, GB of the published scheme", ylabel="measured bin")
        axes.set_title(
            f"bins of {scheme.width_bytes // 2**20:,} MiB: {(counts.diagonal().sum() / counts.sum()):.2%} right"
        )
    figure.suptitle(f"{candidate}, {len(evaluation.label_bytes):,} held-out jobs")
    return figure


def _bin_label(scheme: BinScheme, index: int) -> str:
    width = scheme.width_bytes // (1000 * 2**20)
    return f"{index * width}–{(index + 1) * width}"
