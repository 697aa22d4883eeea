"""Draws the memory over one training step in steady state, stacked by class; the file's suffix
selects the format.

matplotlib draws PNG, SVG and PDF.  :mod:`gpumemnet.tracing.report.plot_html` writes HTML and needs
no further package.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import InvalidRequestError, MissingExtraError
from gpumemnet.gpu.available import VERDICT_TEXTS
from gpumemnet.job.layers import describe
from gpumemnet.tracing.report.answer import TraceAnswer
from gpumemnet.tracing.report.parts import PART_NAMES, shown_mib
from gpumemnet.tracing.report.picture import Picture, peak_lines, picture_of, title_of
from gpumemnet.tracing.report.plot_html import page
from gpumemnet.units import GIB, ceil_mib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES: Final = (".png", ".svg", ".pdf")
_STYLE: Final = {
    "font.size": 9.5,
    "svg.hashsalt": "gpumemnet",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_SIZE_INCHES: Final = (10.0, 5.2)
_DOTS_PER_INCH: Final = 130
_LEFT, _BOTTOM, _WIDTH, _HEIGHT = 0.06, 0.075, 0.68, 0.755
HEADROOM: Final = 1.2
"""Height of the axis over the highest line; the room above that line holds the text on the peak."""
INK, QUIET, UNUSED, AVAILABLE = "#000000", "#555555", "#eeeeee", "#D55E00"
_ON_WHITE: Final = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
DASHES: Final = (0, (4, 2.5))
_CHARACTER_WIDTH: Final = 0.0105
"""Width of one character of a phase's name, as a share of the axis, with the space around the
name."""
_MAX_CHARACTERS: Final = 60


def plot(answer: TraceAnswer, path: Path) -> None:
    """Write the chart of ``answer`` to ``path`` atomically.

    Args:
        answer: the result of a trace, with a curve.
        path: a file that ends in ``.html``, ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        InvalidRequestError: another suffix, an answer without a curve, or a file that cannot be
            written.
        MissingExtraError: matplotlib is needed and not installed.
    """
    picture = picture_of(answer)

    def draw(figure: Figure) -> None:
        _draw_step(figure, answer, picture)
        _draw_legend(figure, answer, picture)

    write_picture(path, lambda: page(answer, picture), draw, _SIZE_INCHES)


def write_picture(
    path: Path,
    page_text: Callable[[], str],
    draw: Callable[[Figure], None],
    size_inches: tuple[float, float],
) -> None:
    """Write a picture to ``path`` atomically, in the format of its suffix.

    Args:
        path: a file that ends in ``.html``, ``.png``, ``.svg`` or ``.pdf``.
        page_text: returns the picture as a page of HTML.
        draw: draws it on an empty figure.
        size_inches: width and height of the figure.

    Raises:
        InvalidRequestError: another suffix, or a file that cannot be written.
        MissingExtraError: matplotlib is needed and not installed.
    """
    suffix = path.suffix.lower()
    if suffix not in (*PICTURES, ".html"):
        raise InvalidRequestError(
            f"must end in .html or {', '.join(PICTURES)}, not {describe(path.name)}", "plot"
        )
    content = (
        page_text().encode()
        if suffix == ".html"
        else _drawn(draw, size_inches, suffix.removeprefix("."))
    )
    try:
        replace_file(path, content)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}", "plot") from None


def _drawn(draw: Callable[[Figure], None], size_inches: tuple[float, float], form: str) -> bytes:
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise MissingExtraError("matplotlib", "plot", "drawing a picture") from None
    content = BytesIO()
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        # a model's name may hold characters that the font lacks; matplotlib draws them as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=size_inches)
        draw(figure)
        undated = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
        figure.savefig(content, format=form, dpi=_DOTS_PER_INCH, metadata=undated[form])
    return content.getvalue()


def _draw_step(figure: Figure, answer: TraceAnswer, picture: Picture) -> None:
    axes = figure.add_axes((_LEFT, _BOTTOM, _WIDTH, _HEIGHT))
    draw_chart(axes, answer, picture, HEADROOM * picture.top_bytes)
    axes.set_xlabel(
        "allocations and frees of one training step, in order; each phase to its own scale",
        color=QUIET,
    )
    axes.set_ylabel("GiB")
    figure.text(
        _LEFT, 0.945, _short(title_of(answer), 90), fontsize=13, fontweight="bold", parse_math=False
    )
    amounts = f"{_amount(answer.expected_bytes)} expected, {_amount(answer.safe_bytes)} safe"
    line = f"{amounts}: {VERDICT_TEXTS[answer.verdict]} in {_amount(answer.available_bytes)}"
    figure.text(_LEFT, 0.897, line, fontsize=10.5, color=QUIET)


def draw_chart(axes: Axes, answer: TraceAnswer, picture: Picture, top_bytes: float) -> None:
    """Draw the memory over a step, its phases and its peak; the axis ends at ``top_bytes``."""
    axes.set_xlim(0, 1)
    axes.set_ylim(0, top_bytes / GIB)
    # from the top band down, each filled to zero: this needs half the points of a band with a lower
    # edge
    reserved = _gib(picture.reserved_bytes)
    axes.stairs(reserved, picture.positions, fill=True, color=UNUSED)
    for band, edge in zip(picture.bands[::-1], picture.edges_bytes[::-1], strict=True):
        axes.stairs(_gib(edge), picture.positions, fill=True, color=band.colour)
    axes.stairs(reserved, picture.positions, baseline=None, color=INK, linewidth=1.4)
    axes.axhline(answer.safe_bytes / GIB, color=INK, linewidth=1.2, linestyle=DASHES)
    if picture.available_bytes is not None:
        axes.axhline(picture.available_bytes / GIB, color=AVAILABLE, linewidth=1.6)
    axes.set_xticks([])
    _draw_phases(axes, picture)
    _draw_peak(axes, answer, picture, top_bytes / GIB)


def _draw_phases(axes: Axes, picture: Picture) -> None:
    """Draw lines between the phases, and their names where these do not overlap; wide phases come
    first."""
    for phase in picture.phases[1:]:
        axes.axvline(phase.start, color="#ffffff", linewidth=1.4)
        axes.axvline(phase.start, color=INK, linewidth=0.8, linestyle=(0, (1, 2)))
    named: list[tuple[float, float]] = []
    for phase in sorted(picture.phases, key=lambda phase: phase.start - phase.end):
        middle, half = (phase.start + phase.end) / 2, _CHARACTER_WIDTH * len(phase.name) / 2
        if all(middle + half < left or middle - half > right for left, right in named):
            named.append((middle - half, middle + half))
            axes.text(
                middle,
                1.015,
                phase.name,
                transform=axes.get_xaxis_transform(),
                ha="center",
                color=QUIET,
            )


def _draw_peak(axes: Axes, answer: TraceAnswer, picture: Picture, top: float) -> None:
    x, y = picture.peak_position, picture.edges_bytes[-1][picture.peak] / GIB
    axes.plot([x, x], [y, 0.98 * top], color=INK, linewidth=0.8)
    axes.plot([x], [y], marker="o", markersize=6, color=INK, markeredgecolor="#ffffff")
    text = "\n".join(_short(line, _MAX_CHARACTERS) for line in peak_lines(answer, picture))
    side, shift = ("left", 0.008) if x < 0.5 else ("right", -0.008)
    axes.text(
        x + shift,
        0.985 * top,
        text,
        ha=side,
        va="top",
        fontsize=9,
        linespacing=1.3,
        parse_math=False,
        bbox=_ON_WHITE,
    )


def _draw_legend(figure: Figure, answer: TraceAnswer, picture: Picture) -> None:
    """Draw two columns beside the chart: lines and bands from the top down, and their MiB at the
    marked point."""
    axes = figure.add_axes(
        (_LEFT + _WIDTH + 0.025, _BOTTOM, 0.98 - (_LEFT + _WIDTH + 0.025), _HEIGHT)
    )
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    peak, bands = picture.peak, picture.bands[::-1]
    lines = [
        ("safe", answer.safe_bytes, INK, DASHES),
        ("nvidia-smi shows", picture.reserved_bytes[peak], INK, "solid"),
    ]
    if picture.available_bytes is not None:
        lines.insert(0, ("available", picture.available_bytes, AVAILABLE, "solid"))
    names = [PART_NAMES["fragmentation"][0], *(band.name for band in bands)]
    colours = [UNUSED, *(band.colour for band in bands)]
    amounts = shown_mib([picture.unused_bytes[peak], *(band.moments_bytes[peak] for band in bands)])

    y, row = 0.935, 0.062
    axes.text(1, 1, "MiB at the peak", ha="right", va="center", color=QUIET)
    for name, amount, colour, dashes in lines:
        axes.plot([0, 0.085], [y, y], color=colour, linewidth=1.6, linestyle=dashes)
        _legend_row(axes, y, name, ceil_mib(amount))
        y -= row
    y -= 0.3 * row
    for name, mib, colour in zip(names, amounts, colours, strict=True):
        axes.fill_between([0, 0.085], y - 0.3 * row, y + 0.3 * row, color=colour, linewidth=0)
        _legend_row(axes, y, name, mib)
        y -= row


def _legend_row(axes: Axes, y: float, name: str, mib: int) -> None:
    axes.text(0.13, y, name, va="center")
    axes.text(1, y, f"{mib:,}", ha="right", va="center")


def _gib(amounts: Sequence[int]) -> list[float]:
    return [amount / GIB for amount in amounts]


def _amount(amount_bytes: int) -> str:
    return f"{ceil_mib(amount_bytes):,} MiB"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
