"""The two pictures of the scoreboard: error against seconds, and the share of readings above an
estimate against its waste."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from .board import Line, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH: Final = 9.0
"""Inches."""
RESOLUTION: Final = 150
OURS: Final = "#0072B2"
COLOURS: Final = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
GREY: Final = "#808080"
_COLUMNS: Final = 2
_ROW_HEIGHT: Final = 3.4
_ORANGE, _GREEN, _PINK, _SKY, _RED, _, _BLACK = COLOURS
_BROWN: Final = "#8C5A2B"
_PURPLE: Final = "#6A3D9A"
_STYLES: Final[Mapping[str, tuple[str, str]]] = {
    "gpumemnet, trace": ("v", OURS),
    "gpumemnet, closed form": ("D", OURS),
    "gpumemnet, classifier (layers)": ("o", OURS),
    "gpumemnet, classifier (totals)": ("s", OURS),
    "DNNMem": ("P", _ORANGE),
    "DNNMem, graph of modules": ("X", _GREEN),
    "DNNMem, as published": ("h", _BROWN),
    "xMem": ("X", _PURPLE),
    "xMem, as published": ("*", _BLACK),
    "MemTracker": ("o", _GREEN),
    "FakeTensor": (">", _RED),
    "FakeTensor, as published": ("<", _BROWN),
    "SchedTune": ("s", _PINK),
    "SchedTune, as published": ("D", _SKY),
    "DNNPerf": ("h", _RED),
    "LLMem": ("d", _GREEN),
    "LLMem, as published": ("d", _BLACK),
    "Transformer Math 101": ("^", _ORANGE),
    "Korthikanti activations": ("v", _PURPLE),
    "Horus": ("p", GREY),
    "Horus, as published": ("p", _PINK),
    "copies and activations": ("P", GREY),
    "naive": ("<", GREY),
    "accelerate estimate-memory": ("v", _BLACK),
    "DeepSpeed ZeRO-2": ("X", _SKY),
    "DeepSpeed ZeRO-3": ("s", _BLACK),
}
"""Estimator → mark and colour, each pair once; ours are blue."""
_OTHER_MARKS: Final = "8dphXP"
_OTHER_COLOURS: Final = (_ORANGE, _GREEN, _PINK, _SKY, _RED)
_UNDER_TICKS: Final = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)
_FASTEST_SECONDS: Final = 1e-5
_LEAST_OVER: Final = 1e-3
_LEAST_ERROR: Final = 5e-4
_OURS: Final = "gpumemnet"


def new_figure(height: float) -> Figure:
    """An empty figure of the common width; ``height`` in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def png(figure: Figure) -> bytes:
    """``figure`` as a PNG."""
    content = BytesIO()
    figure.savefig(content, format="png", dpi=RESOLUTION)
    return content.getvalue()


def error_picture(chosen: Mapping[str, Table]) -> Figure:
    """Median error as it comes (hollow) and with a line (filled), against the seconds of an
    estimate; one panel a set.

    Args:
        chosen: title of a set → its table.
    """

    def draw(axes: Any, line: Line, style: Mapping[str, Any]) -> None:
        if math.isnan(line.raw.seconds):
            return  # published without its time
        seconds = max(line.raw.seconds, _FASTEST_SECONDS)
        axes.plot(
            seconds,
            max(line.raw.median_error, _LEAST_ERROR),
            **{**style, "markerfacecolor": "none"},
        )
        axes.plot(seconds, max(line.with_line.median_error, _LEAST_ERROR), **style)

    figure, panels = _panels(chosen, draw)
    for axes in panels:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("seconds of an estimate (0.00001: or less)", fontsize=8)
        axes.set_ylabel("median relative error (0.05 %: or less)", fontsize=8)
        _shares(axes.yaxis)
    return figure


def bound_picture(chosen: Mapping[str, Table]) -> Figure:
    """Share of readings above the estimate, against what lies above the reading: as it comes
    (hollow), as a bound (filled).

    Args:
        chosen: title of a set → its table.
    """

    def draw(axes: Any, line: Line, style: Mapping[str, Any]) -> None:
        axes.plot(
            max(line.raw.over, _LEAST_OVER), line.raw.under, **{**style, "markerfacecolor": "none"}
        )
        axes.plot(max(line.bound.over, _LEAST_OVER), line.bound.under, **style)

    figure, panels = _panels(chosen, draw)
    for axes in panels:
        axes.set_xscale("log")
        axes.set_xlabel("mean share above the reading (0.1 %: or less)", fontsize=8)
        axes.set_ylabel("readings above the estimate", fontsize=8)
        axes.set_yscale(
            "function", functions=(_root, _square)
        )  # most bounds lie between 0 and 10 %
        axes.set_ylim(-0.0025, 1.08)
        axes.set_yticks(_UNDER_TICKS)
        _shares(axes.xaxis)
        _shares(axes.yaxis)
    return figure


def _panels(
    chosen: Mapping[str, Table], draw: Callable[[Any, Line, Mapping[str, Any]], None]
) -> tuple[Figure, list[Any]]:
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
    """Mark and colour of each estimator, the same in all panels; one that has no place in the table
    takes a pair that is free."""
    found: dict[str, dict[str, Any]] = {}
    free = (
        (mark, colour)
        for mark in _OTHER_MARKS
        for colour in _OTHER_COLOURS
        if (mark, colour) not in _STYLES.values()
    )
    for name in sorted(set(names), key=lambda name: (not name.startswith(_OURS), name)):
        mark, colour = _STYLES.get(name) or next(free)
        ours = name.startswith(_OURS)
        found[name] = {
            "marker": mark,
            "color": colour,
            "linestyle": "none",
            "markersize": 8 if ours else 6,
            "zorder": 3 if ours else 2,
        }
    return found


def _root(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sign(values) * np.sqrt(np.abs(values))


def _square(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.sign(values) * np.square(values)


def _shares(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axis.set_minor_formatter(NullFormatter())
