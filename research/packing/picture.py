"""Draws the comparison: a line for each estimator, and four things that an operator asks, side by
side.

From left to right: how many jobs share a card, how many die, how much memory is set aside (and how
much of it is wasted), and how long jobs wait.
"""

from __future__ import annotations

import textwrap
from io import BytesIO
from pathlib import Path
from typing import Final

from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from research.packing.amounts import EXCLUSIVE, LIMIT, ORACLE, REQUEST, TRACED_LIMIT, TRACED_REQUEST
from research.packing.report import Report

PICTURES: Final = (".png", ".svg", ".pdf")
_STYLE: Final = {"font.size": 9.5, "svg.hashsalt": "gpumemnet"}
_OURS, _OTHERS, _BOUND, _KILLED, _WASTE = "#0072B2", "#9aa5ad", "#444b50", "#D55E00", "#f0c9a8"
_OF_OURS: Final = (LIMIT, REQUEST, TRACED_LIMIT, TRACED_REQUEST)


def check_picture(path: Path) -> None:
    """Refuse a file of a kind that cannot be drawn.

    Raises:
        InvalidRequestError: another suffix.
    """
    if path.suffix.lower() not in PICTURES:
        raise InvalidRequestError(
            f"must end in {', '.join(PICTURES)}, not {describe(path.name)}", "plot"
        )


def draw(made: Report, path: Path) -> None:
    """Write the picture to ``path``, as a whole or not at all.

    Raises:
        InvalidRequestError: another suffix, or a file that cannot be written.
    """
    content = _drawn(made, path.suffix.lower().removeprefix("."))
    try:
        replace_file(path, content)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}", "plot") from None


def _drawn(made: Report, form: str) -> bytes:
    from matplotlib import style
    from matplotlib.figure import Figure

    lines = made.figures
    colours = [
        _OURS if line.key in _OF_OURS else _BOUND if line.key in (EXCLUSIVE, ORACLE) else _OTHERS
        for line in lines
    ]
    needed = [line.reserved_gib_hours - line.waste_gib_hours for line in lines]
    panels = (
        ("jobs on a busy GPU\nat a time", [line.jobs_per_gpu for line in lines], "%.1f"),
        ("runs killed for lack\nof memory", [line.ooms for line in lines], "%d"),
        ("memory set aside, GiB-hours\n(pale: wasted)", needed, ""),
        ("mean wait in the queue,\nhours", [line.wait_hours for line in lines], "%.1f"),
    )
    content = BytesIO()
    with style.context(["default", _STYLE]):
        figure = Figure(figsize=(11.5, 1.75 + 0.34 * len(lines)), layout="constrained")
        for axes, (title, values, label) in zip(
            figure.subplots(1, len(panels), sharey=True), panels, strict=True
        ):
            bars = axes.barh(range(len(lines)), values, color=_KILLED if label == "%d" else colours)
            if not label:
                wasted = [line.waste_gib_hours for line in lines]
                bars = axes.barh(range(len(lines)), wasted, left=values, color=_WASTE)
            shares = [f"{line.waste_share:.0%} wasted" for line in lines]
            axes.bar_label(bars, None if label else shares, fmt=label or "%g", padding=3)
            axes.set_title(title, loc="left", fontsize=9.5)
            axes.set_xticks([])
            axes.margins(x=0.35)
            axes.spines[["top", "right", "bottom"]].set_visible(False)
        names = [textwrap.shorten(line.title, 32, placeholder="…") for line in lines]
        axes.set_yticks(range(len(lines)), names, parse_math=False)
        axes.invert_yaxis()
        drawn = "drawn at random" if made.is_synthetic else "as recorded"
        figure.suptitle(
            f"{made.jobs:,} jobs on {made.inventory}; simulated, arrivals and durations {drawn}",
            fontweight="bold",
            parse_math=False,
        )
        undated = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
        figure.savefig(content, format=form, dpi=130, metadata=undated[form])
    return content.getvalue()
