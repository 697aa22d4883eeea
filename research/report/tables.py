"""Figures as tables in Markdown: all candidates of a section, and its own candidate group by group.

Bins and bytes are two tables, because one would be too wide to read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from gpumemnet.units import MIB
from research.report.figures import GIB_BINS, CandidateFigures, Interval, Section, estimates

from .figures import SCHEMES

NOTHING: Final = "–"
TRACED: Final = "Labels are traced, not measured: the figures are agreement with the trace."
_PUBLISHED_SCHEMES: Final = SCHEMES[1:]
_WIDTHS: Final = tuple(f"{scheme.width_bytes // 2**20:,} MiB" for scheme in _PUBLISHED_SCHEMES)

_BIN_HEADINGS: Final = (
    *("accuracy 1 GiB (95 % interval)", "macro F1 1 GiB", "bin too low 1 GiB"),
    *(f"accuracy {width}" for width in _WIDTHS),
    *(f"macro F1 {width}" for width in _WIDTHS),
)
_BYTE_HEADINGS: Final = (
    *(
        "error median, MiB",
        "error median",
        "error 95th percentile",
        "within 10 %",
        "under-predicted",
    ),
    *("above safe (95 % interval)", "over-allocated", "no safe bytes"),
)
_GROUP_HEADINGS: Final = (
    *(
        "jobs",
        "accuracy 1 GiB (95 % interval)",
        "bin too low 1 GiB",
        *(f"accuracy {width}" for width in _WIDTHS),
    ),
    *(
        "error median",
        "error 95th percentile",
        "under-predicted",
        "above safe",
        "over-allocated",
        "no safe bytes",
    ),
)

PUBLISHED_ACCURACY: Final[Mapping[str, Mapping[str, Mapping[str, float]]]] = {
    "mlp": {
        "MLP-based": {"published-1000mib": 0.95, "published-2000mib": 0.97},
        "transformer-based": {"published-1000mib": 0.97, "published-2000mib": 0.98},
    },
    "cnn": {
        "MLP-based": {"published-8000mib": 0.82},
        "transformer-based": {"published-8000mib": 0.81},
    },
    "transformer": {
        "MLP-based": {"published-8000mib": 0.87},
        "transformer-based": {"published-8000mib": 0.85},
    },
}
"""Family → GPUMemNet's encoder → bin scheme's name → accuracy (arXiv 2602.17817, tables 2–4).

Its jobs ran on one A100 and its test rows are its own, so the figures are a goal and not a
comparison on equal rows.
"""


def published_beside(section: Section) -> Mapping[str, Mapping[str, float]]:
    """The published accuracy of each encoder for a section with measured labels of one family; none
    for other sections and for the zoo."""
    families = {job.family for job in section.jobs}
    if not section.is_measured or section.names or len(families) != 1:
        return {}
    return PUBLISHED_ACCURACY[families.pop()]


LEGEND: Final = (
    "Bins of 1 GiB are judged on jobs up to 40 GiB, the others on all. The 95 % interval is Wilson's, of as many independent "
    "rows as the architectures are worth. Errors are absolute differences of expected bytes and label, as shares of the label "
    "unless in MiB. 'Under-predicted': expected more than 1 % below the label. 'Above safe': label above the safe bytes, of the "
    "jobs that have any. 'Over-allocated': median of safe bytes over label, less one. 'No safe bytes': share that a candidate "
    "gives none for. A job without an answer counts as a wrong bin and has no error. A dash stands where there is nothing to "
    "take a figure of."
)


def bin_table(section: Section, figures: Mapping[str, CandidateFigures]) -> str:
    """Bins of all candidates, the section's own in bold, followed by published figures."""
    rows = [
        _marked(section, candidate, _bin_cells(candidate_figures))
        for candidate, candidate_figures in figures.items()
    ]
    gap = [NOTHING] * len(_PUBLISHED_SCHEMES)
    for encoder, accuracies in published_beside(section).items():
        accuracy = [
            share(accuracies.get(scheme.name, math.nan), 0) for scheme in _PUBLISHED_SCHEMES
        ]
        name = f"as published by GPUMemNet (its own split), {encoder}"
        rows.append([name, NOTHING, NOTHING, NOTHING, *accuracy, *gap])
    return _table(("candidate", *_BIN_HEADINGS), rows)


def byte_table(section: Section, figures: Mapping[str, CandidateFigures]) -> str:
    """Expected and safe bytes of all candidates, the section's own in bold; columns that no
    candidate needs are left out."""
    unanswered = any(
        candidate_figures.without_expected > 0 for candidate_figures in figures.values()
    )
    rows = []
    for candidate, candidate_figures in figures.items():
        cells = [
            *(
                number(candidate_figures.median_error_mib),
                share(candidate_figures.median_error),
                share(candidate_figures.p95_error),
                share(candidate_figures.close),
            ),
            *(
                share(candidate_figures.under_predicted),
                _with_interval(
                    candidate_figures.above_safe, candidate_figures.above_safe_interval, 2
                ),
            ),
            *(share(candidate_figures.over_allocated), share(candidate_figures.without_safe)),
            *([share(candidate_figures.without_expected)] if unanswered else []),
            *([_time(section.seconds.get(candidate, math.nan))] if section.seconds else []),
        ]
        rows.append(_marked(section, candidate, cells))
    more = [*(["no answer"] if unanswered else []), *(["training"] if section.seconds else [])]
    return _table(("candidate", *_BYTE_HEADINGS, *more), rows)


def group_table(word: str, figures: Mapping[str, CandidateFigures]) -> str:
    """One candidate's figures, group by group."""
    return _table(
        (word, *_GROUP_HEADINGS),
        [[name, *_group_cells(group_figures)] for name, group_figures in figures.items()],
    )


def model_table(section: Section) -> str:
    """Real models: the label and every estimate of each, in MiB."""
    series = estimates(section)
    rows = [
        [
            section.names[row],
            f"{section.jobs[row].batch_size:,}",
            *(number(values[row] / MIB, 0) for values in series.values()),
        ]
        for row in range(len(section.jobs))
    ]
    return _table(("model", "batch", *(f"{name}, MiB" for name in series)), rows)


def share(value: float, places: int = 1) -> str:
    """A share as a percentage."""
    return NOTHING if math.isnan(value) else f"{value:,.{places}%}".replace("%", " %")


def number(value: float, places: int = 1) -> str:
    """A number with thousands separators."""
    return NOTHING if math.isnan(value) else f"{value:,.{places}f}"


def _bin_cells(figures: CandidateFigures) -> list[str]:
    gib, others = (
        figures.bins[GIB_BINS.name],
        [figures.bins[scheme.name] for scheme in _PUBLISHED_SCHEMES],
    )
    return [
        _with_interval(gib.accuracy, gib.accuracy_interval, 1),
        share(gib.macro_f1),
        share(gib.too_low),
        *(share(each.accuracy) for each in others),
        *(share(each.macro_f1) for each in others),
    ]


def _group_cells(figures: CandidateFigures) -> list[str]:
    gib = figures.bins[GIB_BINS.name]
    return [
        f"{figures.jobs:,}",
        *(_with_interval(gib.accuracy, gib.accuracy_interval, 1), share(gib.too_low)),
        *(share(figures.bins[scheme.name].accuracy) for scheme in _PUBLISHED_SCHEMES),
        *(share(figures.median_error), share(figures.p95_error), share(figures.under_predicted)),
        *(share(figures.above_safe, 2), share(figures.over_allocated), share(figures.without_safe)),
    ]


def _with_interval(value: float, interval: Interval, places: int) -> str:
    if math.isnan(value):
        return NOTHING
    return f"{share(value, places)} ({100 * interval[0]:.{places}f}–{100 * interval[1]:.{places}f})"


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return NOTHING
    return f"{seconds:,.1f} s" if seconds < 100 else f"{seconds / 60:,.0f} min"


def _marked(section: Section, candidate: str, cells: Sequence[str]) -> list[str]:
    if candidate != section.candidate:
        return [candidate, *cells]
    return [f"**{cell}**" for cell in (candidate, *cells)]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ("---", *["---:"] * (len(headings) - 1)), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )
