"""Pictures of expected bytes: predicted against labelled on logarithmic axes, and the error octave
by octave of memory.

The section's candidate is drawn beside two baselines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from research.report.section import Section

from .candidate_figures import candidate_figures, judged_rows
from .canvas import (
    COLOURS,
    FAMILY_COLOURS,
    GREY,
    OURS,
    label_word,
    memory_axis,
    new_figure,
    shortened,
)
from .groups import octave_groups

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_POINTS: Final = 4_000
_LEAST_ERROR: Final = 1e-4
_MARKERS: Final = ("o", "s", "^")


def scatter_picture(section: Section, candidates: Sequence[str]) -> Figure | None:
    """Expected bytes against labels, one panel per candidate, coloured by family; answers beyond
    the axes are at their edge."""
    rows = judged_rows(section)
    rows = rows[:: -(-len(rows) // _MAX_POINTS)] if len(rows) else rows
    if not len(rows):
        return None
    labels = section.label_bytes[rows]
    families = np.array([section.jobs[row].family for row in rows.tolist()])
    low, high = float(labels.min()) / 2, float(labels.max()) * 2
    figure = new_figure(1.1 + 8.4 / max(len(candidates), 2))
    panels = figure.subplots(1, len(candidates), sharex=True, sharey=True, squeeze=False)[0]
    for axes, candidate, title in zip(panels, candidates, shortened(candidates, 30), strict=True):
        expected = section.answers[candidate].expected_bytes[rows]
        for family, colour in FAMILY_COLOURS.items():
            selected = (families == family) & np.isfinite(expected)
            if selected.any():
                drawn = np.clip(expected[selected], low * 1.03, high / 1.03)
                axes.scatter(
                    labels[selected],
                    drawn,
                    s=7 if len(rows) > 200 else 22,
                    alpha=0.5,
                    color=colour,
                    linewidth=0,
                    label=family,
                )
        axes.plot([low, high], [low, high], "--", color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set(
            xlim=(low, high),
            ylim=(low, high),
            aspect="equal",
            xlabel=f"{label_word(section)} memory",
        )
        axes.set_title(title, fontsize=10)
        axes.tick_params(axis="x", labelrotation=90)
        memory_axis(axes.xaxis)
        memory_axis(axes.yaxis)
    panels[0].set_ylabel("expected memory")
    if len(set(families.tolist())) > 1:
        figure.legend(
            *panels[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=3,
            frameon=False,
            markerscale=2.5,
        )
    return figure


def octave_picture(section: Section, candidates: Sequence[str]) -> Figure | None:
    """Absolute error as a share of the label: median (mark) and 95th percentile (end of the line)
    in every octave of labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    groups = octave_groups(section.label_bytes, judged_rows(section))
    if not groups:
        return None
    figure = new_figure(4.2)
    axes = figure.subplots()
    names, lowest, highest = shortened(candidates, 40), 0.1, 0.1
    for index, (candidate, name) in enumerate(zip(candidates, names, strict=True)):
        figures = [candidate_figures(section, candidate, group.rows) for group in groups]
        median = np.maximum([each.median_error for each in figures], _LEAST_ERROR)
        p95 = np.maximum([each.p95_error for each in figures], _LEAST_ERROR)
        highest = max(highest, float(np.max(p95, initial=0.0, where=~np.isnan(p95))))
        lowest = min(lowest, float(np.min(median, initial=lowest, where=~np.isnan(median))))
        positions = np.arange(len(groups)) + 0.2 * (index - (len(candidates) - 1) / 2)
        colour = OURS if index == 0 else COLOURS[index - 1]
        axes.vlines(positions, median, p95, color=colour, linewidth=1.6)
        axes.plot(positions, median, _MARKERS[index % 3], color=colour, label=name, markersize=6)
        axes.plot(positions, p95, "_", color=colour, markersize=8)
    axes.axhline(0.1, color=GREY, linestyle="--", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_ylim(lowest / 3, highest * 3)
    axes.yaxis.set_major_locator(LogLocator(base=10))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.set_xticks(
        range(len(groups)),
        [f"{group.name.replace(' GiB', '')}\n{len(group.rows):,}" for group in groups],
    )
    axes.set(
        xlabel=f"{label_word(section)} memory in GiB, and jobs",
        ylabel="absolute error, share of the label",
    )
    axes.set_title(
        "median error (mark) and 95th percentile (end of the line); dashed: 10 %", fontsize=11
    )
    figure.legend(loc="outside lower center", ncols=min(len(candidates), 2), frameon=False)
    return figure
