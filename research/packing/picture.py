"""Draws the comparison: a line for each estimator, and four things that an operator asks, side by
side.

From left to right: how many jobs share a card, how many die, how much memory is set aside (and how
    much of it is needed), and
how long jobs wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import InvalidRequestError, MissingExtraError
from gpumemnet.job.layers import describe
from research.packing.amounts import EXCLUSIVE, LIMIT, ORACLE, REQUEST, TRACED_LIMIT, TRACED_REQUEST
from research.packing.report import Figures, Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURES: Final = (".png", ".svg", ".pdf")
_STYLE: Final = {"font.size": 10, "svg.hashsalt": "gpumemnet", "axes.grid": False}
_WIDTH_INCHES: Final = 11.5
_DOTS_PER_INCH: Final = 130
_INK, _QUIET, _FRAME = "#222222", "#666666", "#cccccc"
_OURS, _OTHERS, _BOUND, _KILLED, _WASTE = "#0072B2", "#9aa5ad", "#444b50", "#D55E00", "#f0c9a8"
_OF_OURS: Final = (LIMIT, REQUEST, TRACED_LIMIT, TRACED_REQUEST)
_MAX_CHARACTERS: Final = 32


def check_picture(path: Path) -> None:
    """Refuse a file of a kind that cannot be drawn.

    Raises:
        InvalidRequestError: another suffix.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix.lower() not in PICTURES:
        raise InvalidRequestError(
            f"must end in {', '.join(PICTURES)}, not {describe(path.name)}", "plot"
        )
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise MissingExtraError("matplotlib", "plot", "drawing a comparison") from None


def draw(made: Report, path: Path) -> None:
    """Write the picture to ``path``, as a whole or not at all.

    Raises:
        InvalidRequestError: another suffix, or a file that cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    check_picture(path)
    content = _drawn(made, path.suffix.lower().removeprefix("."))
    try:
        replace_file(path, content)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}", "plot") from None


def _drawn(made: Report, form: str) -> bytes:
    from matplotlib import style
    from matplotlib.figure import Figure

    lines = made.figures
    content = BytesIO()
    with style.context(["default", _STYLE]):
        height = 1.75 + 0.34 * len(lines)
        figure = Figure(figsize=(_WIDTH_INCHES, height))
        top, bottom = 1 - 1.05 / height, 0.55 / height
        axes = figure.subplots(
            1, 4, sharey=True, gridspec_kw={"width_ratios": (1, 1, 1.6, 1), "wspace": 0.13}
        )
        figure.subplots_adjust(left=0.215, right=0.985, top=top, bottom=bottom)
        _bars(
            axes[0],
            lines,
            "jobs on a busy GPU\nat a time",
            lambda line: line.jobs_per_gpu,
            "{:.1f}",
        )
        _bars(
            axes[1],
            lines,
            "runs killed for lack\nof memory",
            lambda line: line.ooms,
            "{:,.0f}",
            _KILLED,
        )
        _memory(axes[2], lines, made.needed_gib_hours)
        _bars(
            axes[3],
            lines,
            "mean wait in the queue,\nhours",
            lambda line: line.wait_hours,
            "{:,.1f}",
        )
        axes[0].set_yticks(range(len(lines)), [_short(line.title) for line in lines])
        for label, line in zip(axes[0].get_yticklabels(), lines, strict=True):
            label.set_parse_math(False)
            label.set_color(_OURS if line.key in _OF_OURS else _INK)
            label.set_fontweight("bold" if line.key in _OF_OURS else "normal")
        axes[0].set_ylim(len(lines) - 0.4, -0.6)
        heading = f"{made.jobs:,} jobs on {made.inventory}: what changes with who says how much memory a job takes"
        figure.text(
            0.012,
            1 - 0.3 / height,
            heading,
            fontsize=12.5,
            fontweight="bold",
            color=_INK,
            parse_math=False,
        )
        figure.text(
            0.012, 0.14 / height, _footnote(made), fontsize=8.5, color=_QUIET, parse_math=False
        )
        undated = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
        figure.savefig(content, format=form, dpi=_DOTS_PER_INCH, metadata=undated[form])
    return content.getvalue()


def _bars(
    axes: Axes,
    lines: Sequence[Figures],
    title: str,
    value: Callable[[Figures], float],
    form: str,
    colour: str | None = None,
) -> None:
    values = [value(line) for line in lines]
    longest = max(*values, 1e-9)
    axes.barh(
        range(len(lines)), values, height=0.66, color=[colour or _colour(line) for line in lines]
    )
    for row, number in enumerate(values):
        axes.text(
            number + 0.03 * longest, row, form.format(number), va="center", color=_INK, fontsize=9.5
        )
    _frame(axes, title, 1.3 * longest)


def _memory(axes: Axes, lines: Sequence[Figures], needed: float) -> None:
    """What is set aside, and which part of it is needed; a line where it would be just right."""
    used = [line.reserved_gib_hours - line.waste_gib_hours for line in lines]
    axes.barh(range(len(lines)), used, height=0.66, color=[_colour(line) for line in lines])
    axes.barh(
        range(len(lines)),
        [line.waste_gib_hours for line in lines],
        left=used,
        height=0.66,
        color=_WASTE,
    )
    longest = max(max(line.reserved_gib_hours for line in lines), needed)
    for row, line in enumerate(lines):
        text = f"{line.waste_share:.0%} wasted"
        axes.text(
            line.reserved_gib_hours + 0.015 * longest,
            row,
            text,
            va="center",
            color=_INK,
            fontsize=9.5,
        )
    axes.axvline(needed, color=_INK, linewidth=0.9, linestyle=(0, (3, 2)))
    _frame(axes, "memory set aside, GiB-hours\n(dashed: what the jobs need)", 1.32 * longest)


def _frame(axes: Axes, title: str, right: float) -> None:
    axes.set_title(title, loc="left", fontsize=9.5, color=_QUIET, linespacing=1.25)
    axes.set_xlim(0, right)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "left")
        spine.set_color(_FRAME)


def _colour(line: Figures) -> str:
    if line.key in _OF_OURS:
        return _OURS
    return _BOUND if line.key in (EXCLUSIVE, ORACLE) else _OTHERS


def _footnote(made: Report) -> str:
    drawn = (
        "arrivals and durations drawn at random"
        if made.is_synthetic
        else "arrivals and durations as recorded"
    )
    return f"Simulated; {drawn}; a job that runs out of memory runs again alone."


def _short(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…"
