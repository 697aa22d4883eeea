"""The picture of real models: bars side by side per model and batch, as in GPUMemNet's (arXiv
2602.17817, section 6).

Models need between half a GiB and the whole card.  So small and large ones are in separate panels,
and a bar that is far too long for its panel is cut, with its value beside the cut.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.units import GIB
from research.report.section import Section

from .candidate_figures import judged_rows
from .canvas import COLOURS, GREY, OURS, new_figure, shortened
from .zoo import estimates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

BARS_PER_PANEL: Final = 48
CUT: Final = 2.2
"""Bars end at this multiple of the largest label in their panel."""
LONGEST_NAME: Final = 14
"""Characters of a model's name that fit under one group of bars."""
_LABEL_COLOUR: Final = "#4D4D4D"


def zoo_picture(section: Section) -> Figure | None:
    """Labels beside the candidate, the trace and every published estimator; ``None`` where the jobs
    have no names."""
    rows = judged_rows(section)
    if not section.names or not len(rows):
        return None
    series = estimates(section)
    panels = _panels(section, rows, max(2, BARS_PER_PANEL // len(series)))
    figure = new_figure(0.7 + 2.5 * len(panels))
    for axes, panel_rows in zip(
        figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True
    ):
        _draw_panel(axes, section, panel_rows, series)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, shortened(names), loc="outside upper center", ncols=3, frameon=False)
    return figure


def _panels(section: Section, rows: NDArray[np.int64], groups: int) -> list[list[int]]:
    """Rows of each panel: models from small to large, kept together, each by rising batch size."""
    models: dict[str, list[int]] = {}
    for row in sorted(rows.tolist(), key=lambda row: section.jobs[row].batch_size):
        models.setdefault(section.names[row], []).append(row)
    panels: list[list[int]] = [[]]
    for model_rows in sorted(
        models.values(), key=lambda model_rows: float(np.median(section.label_bytes[model_rows]))
    ):
        if panels[-1] and len(panels[-1]) + len(model_rows) > groups:
            panels.append([])
        panels[-1] += model_rows
    return panels


def _draw_panel(
    axes: Axes, section: Section, rows: Sequence[int], series: dict[str, Array]
) -> None:
    top = CUT * float(section.label_bytes[rows].max()) / GIB
    width = 0.84 / len(series)
    for index, (name, values) in enumerate(series.items()):
        colour = (_LABEL_COLOUR, OURS, *COLOURS)[index % (2 + len(COLOURS))]
        positions = np.arange(len(rows)) - 0.42 + width * (index + 0.5)
        heights = np.nan_to_num(values[rows] / GIB)
        axes.bar(positions, np.minimum(heights, top), width, color=colour, label=name)
        for position, height in zip(positions, heights, strict=True):
            if height > top:
                axes.text(
                    position,
                    0.98 * top,
                    f"{height:.3g}",
                    rotation=90,
                    ha="center",
                    va="top",
                    fontsize=7,
                )
    axes.set(ylim=(0, top), xlim=(-0.6, len(rows) - 0.4), ylabel="GiB")
    axes.set_xticks(range(len(rows)), _group_names(section, rows), fontsize=9)
    axes.tick_params(axis="x", length=0)
    for position in range(1, len(rows)):
        if section.names[rows[position]] != section.names[rows[position - 1]]:
            axes.axvline(position - 0.5, color=GREY, linewidth=0.6)


def _group_names(section: Section, rows: Sequence[int]) -> list[str]:
    """The batch under each group, and a model's name once, under the middle one of its groups."""
    names = [f"batch {section.jobs[row].batch_size}" for row in rows]
    for model in dict.fromkeys(section.names[row] for row in rows):
        positions = [position for position, row in enumerate(rows) if section.names[row] == model]
        # a model with one group has only the width of that group
        words = textwrap.fill(model.replace("_", " "), LONGEST_NAME * len(positions), max_lines=2)
        names[positions[len(positions) // 2]] += f"\n{words}"
    return names
