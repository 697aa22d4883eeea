"""The two pictures of the scoreboard: error against seconds, and the share of readings above an estimate against its waste."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..report.canvas import COLOURS, GREY, OURS, new_figure
from .board import Line, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS: Final = 2
_ROW_HEIGHT: Final = 3.4
_MARKS: Final = "osD^vP*X<>hpd"
_FASTEST_SECONDS: Final = 1e-5
_LEAST_OVER: Final = 1e-3
_OURS: Final = "gpumemnet"


def error_picture(chosen: Mapping[str, Table]) -> Figure:
    """Median error as it comes (hollow) and with a line (filled), against the seconds of an estimate; one panel a set.

    Args:
        chosen: title of a set → its table.
    """

    def draw(axes: Any, line: Line, style: Mapping[str, Any]) -> None:
        if math.isnan(line.raw.seconds):
            return  # published without its time
        seconds = max(line.raw.seconds, _FASTEST_SECONDS)
        axes.plot(seconds, line.raw.median_error, **{**style, "markerfacecolor": "none"})
        axes.plot(seconds, line.with_line.median_error, **style)

    figure, panels = _panels(chosen, draw)
    for axes in panels:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("seconds of an estimate")
        axes.set_ylabel("median relative error")
        _shares(axes.yaxis)
    return figure


def bound_picture(chosen: Mapping[str, Table]) -> Figure:
    """Share of readings above the estimate, against what lies above the reading: as it comes (hollow), as a bound (filled).

    Args:
        chosen: title of a set → its table.
    """

    def draw(axes: Any, line: Line, style: Mapping[str, Any]) -> None:
        axes.plot(max(line.raw.over, _LEAST_OVER), line.raw.under, **{**style, "markerfacecolor": "none"})
        axes.plot(max(line.bound.over, _LEAST_OVER), line.bound.under, **style)

    figure, panels = _panels(chosen, draw)
    for axes in panels:
        axes.set_xscale("log")
        axes.set_xlabel("mean share above the reading")
        axes.set_ylabel("readings above the estimate")
        axes.set_ylim(-0.04, 1.04)
        _shares(axes.xaxis)
        _shares(axes.yaxis)
    return figure


def _panels(chosen: Mapping[str, Table], draw: Callable[[Any, Line, Mapping[str, Any]], None]) -> tuple[Figure, list[Any]]:
    rows = math.ceil(len(chosen) / _COLUMNS)
    figure = new_figure(_ROW_HEIGHT * rows + 1.6)
    grid = np.atleast_1d(figure.subplots(rows, _COLUMNS, squeeze=False)).ravel().tolist()
    styles = _styles([line.name for table in chosen.values() for line in table.lines])
    for axes, (title, table) in zip(grid, chosen.items(), strict=False):
        for line in table.lines:
            draw(axes, line, styles[line.name])
        axes.set_title(f"{title} ({table.rows:,} rows)", fontsize=8)
        axes.grid(alpha=0.25)
    for axes in grid[len(chosen) :]:
        axes.set_visible(False)
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], label=name, **style) for name, style in styles.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    return figure, grid[: len(chosen)]


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Mark and colour of each estimator, the same in all panels; ours are blue."""
    found: dict[str, dict[str, Any]] = {}
    others = 0
    for name in sorted(set(names), key=lambda name: (not name.startswith(_OURS), name)):
        ours = name.startswith(_OURS)
        colours = [*COLOURS[:5], COLOURS[6], GREY]
        colour = OURS if ours else colours[others % len(colours)]
        mark = _MARKS[len(found) % len(_MARKS)]
        others += not ours
        found[name] = {
            "marker": mark,
            "color": colour,
            "linestyle": "none",
            "markersize": 8 if ours else 6,
            "zorder": 3 if ours else 2,
        }
    return found


def _shares(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axis.set_minor_formatter(NullFormatter())
