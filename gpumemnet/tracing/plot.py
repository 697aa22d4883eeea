"""Draws the memory over one training step in steady state, stacked by class, with matplotlib; the
file's suffix selects PNG, SVG or PDF.

Each phase has a minimum width, because an optimizer with fused kernels allocates a few times and a
backward pass thousands of times.  A long step is reduced to visible points; each point is the
maximum of its interval, so no maximum is lost.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import InvalidRequestError, MissingExtraError
from gpumemnet.gpu.available import VERDICT_TEXTS
from gpumemnet.job.layers import describe
from gpumemnet.tracing.result import PART_NAMES, Curve, TraceAnswer, shown_mib
from gpumemnet.units import GIB, ceil_mib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final = {
    "context": "#999999",
    "communicator": "#BBBBBB",
    "parameter": "#0072B2",
    "buffer": "#000000",
    "optimizer_state": "#009E73",
    "gradient": "#E69F00",
    "saved_activation": "#56B4E9",
    "input": "#F0E442",
    "temporary": "#D55E00",
    "communication": "#661100",
    "workspace": "#CC79A7",
}
"""Bands from the bottom up, the constant ones first, in the colours of Okabe and Ito for
colour-blind readers."""
MAX_MOMENTS: Final = 1_200
_LEAST_WIDTH: Final = 0.07
_START: Final = "start"
"""The part before the first phase: gradients are freed and the batch is loaded."""


@dataclass(frozen=True, slots=True)
class Band:
    """One band of the stacked chart.

    Attributes:
        part: memory class, or ``context``.
        name: its label.
        colour: as ``#rrggbb``.
        moments_bytes: its bytes at each point of the chart.
    """

    part: str
    name: str
    colour: str
    moments_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A phase, from ``start`` to ``end`` on a horizontal axis from 0 to 1."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The chart of a step; its points are selected events of the curve.

    Attributes:
        bands: from the bottom up, the CUDA context first; classes without bytes in the step are
            left out.
        reserved_bytes: reserved bytes and context at each point, as ``nvidia-smi`` shows them.
        positions: start of each point's interval on the axis from 0 to 1, followed by 1.
        events: index of each point's event in the curve.
        phases: in order, adjacent to each other, from 0 to 1.
        phase_of: index of the phase of each point.
        peak: index of the marked point.
        is_run_peak: whether the marked point is the peak of the run, to which the answer's parts
            refer.
        available_bytes: memory that a process can use on the GPU; ``None`` if it is too far above
            the curve to draw.
        top_bytes: bytes of the highest line.
    """

    bands: tuple[Band, ...]
    reserved_bytes: tuple[int, ...]
    positions: tuple[float, ...]
    events: tuple[int, ...]
    phases: tuple[Span, ...]
    phase_of: tuple[int, ...]
    peak: int
    is_run_peak: bool
    available_bytes: int | None
    top_bytes: int

    @property
    def edges_bytes(self) -> list[list[int]]:
        """The upper edge of each band, from the bottom up."""
        edges: list[list[int]] = np.cumsum(
            [band.moments_bytes for band in self.bands], axis=0
        ).tolist()
        return edges

    @property
    def unused_bytes(self) -> list[int]:
        """Reserved bytes that no tensor holds, at each point."""
        return [
            reserved - used
            for reserved, used in zip(self.reserved_bytes, self.edges_bytes[-1], strict=True)
        ]

    @property
    def peak_position(self) -> float:
        """Position of the marked point, in the middle of its interval."""
        return (self.positions[self.peak] + self.positions[self.peak + 1]) / 2


def picture_of(answer: TraceAnswer) -> Picture:
    """Return the chart of an answer.

    Raises:
        InvalidRequestError: the answer has no curve.
    """
    curve = answer.curve
    if curve is None or not curve.reserved_bytes:
        raise InvalidRequestError(
            "the answer has no curve; trace with ExtraResults(curve=True)", "plot"
        )
    amounts = np.array(curve.bytes_by_class, dtype=np.int64).reshape(len(curve.classes), -1)
    totals = amounts.sum(axis=0)
    marked, is_run_peak = _marked(answer, curve, amounts, totals)
    names, bounds, edges = _phases(curve)
    events, positions, phase_of = _moments(bounds, edges, totals, marked)
    kept = amounts[:, events]
    other = {part: answer.parts[part] for part in ("context", "communicator") if answer.parts[part]}
    rows = {part: [size] * len(events) for part, size in other.items()}
    rows |= {
        name: kept[row].tolist() for row, name in enumerate(curve.classes) if amounts[row].any()
    }
    reserved = tuple(curve.reserved_bytes[event] + sum(other.values()) for event in events)
    highest = max(*reserved, answer.expected_bytes, answer.safe_bytes)
    available_bytes = answer.available_bytes if answer.available_bytes < 2 * highest else None
    return Picture(
        bands=tuple(
            Band(part, PART_NAMES[part][0], colour, tuple(rows[part]))
            for part, colour in COLOURS.items()
            if part in rows
        ),
        reserved_bytes=reserved,
        positions=tuple(positions),
        events=tuple(events),
        phases=tuple(
            Span(name, start, end)
            for name, (start, end) in zip(names, pairwise(edges), strict=True)
        ),
        phase_of=tuple(phase_of),
        peak=events.index(marked),
        is_run_peak=is_run_peak,
        available_bytes=available_bytes,
        top_bytes=max(highest, available_bytes or 0),
    )


def title_of(answer: TraceAnswer) -> str:
    """Return one line on what was traced."""
    gpu = answer.gpu if answer.ranks == 1 else f"one of {answer.ranks:,} x {answer.gpu}"
    return f"{answer.model}, batch size {answer.batch_size:,}, on {gpu}"


def peak_lines(answer: TraceAnswer, picture: Picture) -> tuple[str, str]:
    """Return two lines on the marked point: its phase and bytes, and the operator that
    allocated."""
    used = picture.edges_bytes[-1][picture.peak] / GIB
    phase = picture.phases[picture.phase_of[picture.peak]].name
    peak = answer.peak
    if picture.is_run_peak:
        module = f" in {peak.module}" if peak.module else ""
        return f"peak: {used:,.2f} GiB in use, {phase}", f"{peak.operator}{module}"
    step = f", step {peak.step}" if peak.step else ""
    return (
        f"most of this step: {used:,.2f} GiB in use, {phase}",
        f"the run's peak is elsewhere: {peak.phase}{step}",
    )


def _marked(
    answer: TraceAnswer, curve: Curve, amounts: npt.NDArray[np.int64], totals: npt.NDArray[np.int64]
) -> tuple[int, bool]:
    """Return the event to mark, and whether it is the peak of the run.

    The peak of the run may lie outside the step in steady state, for example in the first step.
    Then the maximum of the step is marked.
    """
    parts = np.array([answer.parts.get(name, 0) for name in curve.classes], dtype=np.int64)
    alike = np.flatnonzero((amounts == parts[:, np.newaxis]).all(axis=0))
    return (int(alike[0]), True) if alike.size else (int(totals.argmax()), False)


def _phases(curve: Curve) -> tuple[list[str], list[int], list[float]]:
    """Return names of the phases that have events, the events at their bounds, and the positions of
    their bounds."""
    n_events = len(curve.reserved_bytes)
    phases = [(_START, 0), *curve.phases]
    ends = [*(start for _, start in curve.phases), n_events]
    filled = [(name, start) for (name, start), end in zip(phases, ends, strict=True) if end > start]
    names, bounds = [name for name, _ in filled], [*(start for _, start in filled), n_events]
    widths = np.maximum(np.diff(bounds) / n_events, min(_LEAST_WIDTH, 0.5 / len(names)))
    edges = [0.0, *np.cumsum(widths / widths.sum()).tolist()]
    return names, bounds, [*edges[:-1], 1.0]


def _moments(
    bounds: Sequence[int], edges: Sequence[float], totals: npt.NDArray[np.int64], marked: int
) -> tuple[list[int], list[float], list[int]]:
    """Return the selected events, the start of each one's interval, and its phase."""
    events: list[int] = []
    positions: list[float] = []
    phase_of: list[int] = []
    for phase, ((first, end), (left, right)) in enumerate(
        zip(pairwise(bounds), pairwise(edges), strict=True)
    ):
        stretches = max(1, min(end - first, int(MAX_MOMENTS * (right - left))))
        cuts = [first + (end - first) * stretch // stretches for stretch in range(stretches + 1)]
        for start, stop in pairwise(cuts):
            events.append(
                marked if start <= marked < stop else start + int(totals[start:stop].argmax())
            )
            positions.append(left + (right - left) * (start - first) / (end - first))
            phase_of.append(phase)
    return events, [*positions, 1.0], phase_of


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
        path: a file that ends in ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        InvalidRequestError: another suffix, an answer without a curve, or a file that cannot be
            written.
        MissingExtraError: matplotlib is needed and not installed.
    """
    picture = picture_of(answer)

    def draw(figure: Figure) -> None:
        _draw_step(figure, answer, picture)
        _draw_legend(figure, answer, picture)

    write_picture(path, draw, _SIZE_INCHES)


def write_picture(
    path: Path,
    draw: Callable[[Figure], None],
    size_inches: tuple[float, float],
) -> None:
    """Write a picture to ``path`` atomically, in the format of its suffix.

    Args:
        path: a file that ends in ``.png``, ``.svg`` or ``.pdf``.
        draw: draws it on an empty figure.
        size_inches: width and height of the figure.

    Raises:
        InvalidRequestError: another suffix, or a file that cannot be written.
        MissingExtraError: matplotlib is needed and not installed.
    """
    suffix = path.suffix.lower()
    if suffix not in PICTURES:
        raise InvalidRequestError(
            f"must end in {', '.join(PICTURES)}, not {describe(path.name)}", "plot"
        )
    content = _drawn(draw, size_inches, suffix.removeprefix("."))
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
