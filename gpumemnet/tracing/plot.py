"""Draws the memory over one training step in steady state, stacked by class, with matplotlib; the
file's suffix selects PNG, SVG or PDF.

Each phase has a minimum width, because an optimizer with fused kernels allocates a few times and a
backward pass thousands of times.  A long step is reduced to visible points; each point is the
maximum of its interval, so no maximum is lost.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.atomic_files import write_output
from gpumemnet.errors import InvalidRequestError, check_installed
from gpumemnet.gpu import VERDICT_TEXTS
from gpumemnet.job.layers import describe
from gpumemnet.tracing.result import PART_NAMES, TraceAnswer, shown_mib
from gpumemnet.units import GIB, ceil_mib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURES: Final = (".png", ".svg", ".pdf")
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
MAX_POINTS: Final = 1_200
HEADROOM: Final = 1.25
"""Height of the axis over the highest line; the room above that line holds the text on the peak."""
INK, QUIET, UNUSED, AVAILABLE = "#000000", "#555555", "#eeeeee", "#D55E00"
DASHES: Final = (0, (4, 2.5))
_STYLE: Final = {
    "font.size": 9.5,
    "svg.hashsalt": "gpumemnet",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_SIZE_INCHES: Final = (10.0, 5.2)
_DOTS_PER_INCH: Final = 130
_LEAST_WIDTH: Final = 0.07
_START: Final = "start"
"""The part before the first phase: gradients are freed and the batch is loaded."""


@dataclass(frozen=True, slots=True, eq=False)
class StepChart:
    """What is drawn of a step; its points are selected events of the curve.

    Attributes:
        bands: part → its bytes at each point, from the bottom up, the CUDA context first; classes
            without bytes in the step are left out.
        reserved_bytes: reserved bytes and context at each point, as ``nvidia-smi`` shows them.
        positions: start of each point's interval on the axis from 0 to 1, followed by 1.
        phases: names with start and end on the axis.
        peak: index of the marked point, the most of this step.
    """

    bands: dict[str, NDArray[np.int64]]
    reserved_bytes: NDArray[np.int64]
    positions: NDArray[np.float64]
    phases: tuple[tuple[str, float, float], ...]
    peak: int

    @property
    def used_bytes(self) -> NDArray[np.int64]:
        """The bytes of all bands at each point."""
        return np.sum(list(self.bands.values()), axis=0)


def step_chart(answer: TraceAnswer) -> StepChart:
    """Return what is drawn of an answer.

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
    names, bounds, edges = _phases((*curve.phases,), len(totals))
    cuts = np.unique(
        np.concatenate((np.linspace(0, len(totals), MAX_POINTS - len(names), dtype=int), bounds))
    )
    events = np.array(
        [start + totals[start:end].argmax() for start, end in pairwise(cuts.tolist())]
    )
    outside = [answer.parts[part] for part in ("context", "communicator")]
    rows = {
        **{part: np.full(len(events), answer.parts[part]) for part in ("context", "communicator")},
        **dict(zip(curve.classes, amounts[:, events], strict=True)),
    }
    return StepChart(
        bands={part: rows[part] for part in COLOURS if part in rows and rows[part].any()},
        reserved_bytes=np.array(curve.reserved_bytes)[events] + sum(outside),
        positions=np.interp(cuts, bounds, edges),
        phases=tuple(
            (name, start, end) for name, (start, end) in zip(names, pairwise(edges), strict=True)
        ),
        peak=int(totals[events].argmax()),
    )


def _phases(
    phases: tuple[tuple[str, int], ...], events: int
) -> tuple[list[str], list[int], list[float]]:
    """Return names of the phases that have events, the events at their bounds, and the positions of
    their bounds."""
    ends = [*(start for _, start in phases), events]
    filled = [
        (name, start)
        for (name, start), end in zip(((_START, 0), *phases), ends, strict=True)
        if end > start
    ]
    bounds = [*(start for _, start in filled), events]
    widths = np.maximum(np.diff(bounds) / events, min(_LEAST_WIDTH, 0.5 / len(filled)))
    edges = np.concatenate(([0.0], np.cumsum(widths / widths.sum()))).tolist()
    return [name for name, _ in filled], bounds, [*edges[:-1], 1.0]


def plot(answer: TraceAnswer, path: Path) -> None:
    """Write the chart of ``answer`` to ``path`` atomically.

    Args:
        answer: the result of a trace, with a curve.
        path: a file that ends in ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        InvalidRequestError: another suffix, an answer without a curve, or a file that cannot be
            written.
        MissingExtraError: matplotlib is not installed.
    """
    form, chart = picture_format(path), step_chart(answer)
    gpu = answer.gpu if answer.ranks == 1 else f"one of {answer.ranks:,} x {answer.gpu}"
    title = f"{answer.model}, batch size {answer.batch_size:,}, on {gpu}"
    amounts = ", ".join(f"{_mib_text(size)} {name}" for name, size in answer.amounts)
    line = f"{amounts}: {VERDICT_TEXTS[answer.verdict]} in {_mib_text(answer.available_bytes)}"
    check_installed("matplotlib", "plot", "drawing a picture")
    from matplotlib import style
    from matplotlib.figure import Figure

    content = BytesIO()
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        # a model's name may hold characters that the font lacks; matplotlib draws them as boxes
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = Figure(figsize=_SIZE_INCHES)
        axes = figure.add_axes((0.06, 0.075, 0.68, 0.755))
        _draw_step(axes, answer, chart)
        axes.set_xlabel(
            "allocations and frees of one training step, in order; each phase to its own scale",
            color=QUIET,
        )
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(1.02, 1),
            frameon=False,
            title="MiB at the peak",
            reverse=True,
        )
        figure.text(
            0.06,
            0.945,
            shorten(title, 90, placeholder=" …"),
            fontsize=13,
            parse_math=False,
        )
        figure.text(0.06, 0.897, line, fontsize=10.5, color=QUIET)
        undated = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
        figure.savefig(content, format=form, dpi=_DOTS_PER_INCH, metadata=undated[form])
    write_output(path, content.getvalue(), "plot")


def picture_format(path: Path) -> str:
    """Return the format of a picture's suffix.

    Raises:
        InvalidRequestError: another suffix.
    """
    suffix = path.suffix.lower()
    if suffix not in PICTURES:
        raise InvalidRequestError(
            f"must end in {' or '.join(PICTURES)}, not {describe(path.name)}", "plot"
        )
    return suffix[1:]


def _draw_step(axes: Axes, answer: TraceAnswer, chart: StepChart) -> None:
    """Draw the memory over a step, its phases and its peak; each line and band has a label for the
    legend."""
    lines: list[tuple[int, str, Any, str]] = [(answer.safe_bytes, INK, DASHES, "safe")]
    highest_bytes = max(answer.expected_bytes, answer.safe_bytes)
    if answer.available_bytes < 2 * highest_bytes:  # else it would press the curve down
        lines.append((answer.available_bytes, AVAILABLE, "solid", "available"))
        highest_bytes = max(highest_bytes, answer.available_bytes)
    top, peak = HEADROOM * highest_bytes / GIB, chart.peak
    axes.set_xlim(0, 1)
    axes.set_ylim(0, top)
    axes.set_ylabel("GiB")
    axes.set_xticks([])
    unused = int(chart.reserved_bytes[peak] - chart.used_bytes[peak])
    mib = shown_mib([*(int(band[peak]) for band in chart.bands.values()), unused])
    # the bands behind come last: each is filled from zero up to its upper edge
    edge, order = np.zeros(len(chart.reserved_bytes)), 2.0
    for (part, band), amount in zip(chart.bands.items(), mib, strict=False):
        edge, order = edge + band / GIB, order - 0.05
        label = f"{amount:,} {PART_NAMES[part]}"
        axes.stairs(
            edge, chart.positions, fill=True, color=COLOURS[part], label=label, zorder=order
        )
    reserved = chart.reserved_bytes / GIB
    label = f"{mib[-1]:,} {PART_NAMES['fragmentation']}"
    axes.stairs(reserved, chart.positions, fill=True, color=UNUSED, label=label, zorder=1)
    label = f"{ceil_mib(int(chart.reserved_bytes[peak])):,} nvidia-smi shows"
    axes.stairs(
        reserved, chart.positions, baseline=None, color=INK, linewidth=1.4, label=label, zorder=3
    )
    for amount, colour, dashes, name in lines:
        label = f"{ceil_mib(amount):,} {name}"
        axes.axhline(amount / GIB, color=colour, linewidth=1.4, linestyle=dashes, label=label)
    for name, start, end in chart.phases:
        axes.axvline(start, color=INK, linewidth=0.8, linestyle=(0, (1, 2)), zorder=3)
        if end - start >= 0.7 * _LEAST_WIDTH:
            axes.text(
                (start + end) / 2,
                1.015,
                name,
                transform=axes.get_xaxis_transform(),
                ha="center",
                color=QUIET,
            )
    phase = [name for name, start, _ in chart.phases if start <= chart.positions[peak]][-1]
    x = (chart.positions[peak] + chart.positions[peak + 1]) / 2
    axes.plot([x], [edge[peak]], marker="o", markersize=6, color=INK, markeredgecolor="#ffffff")
    axes.text(
        x,
        0.985 * top,
        f"most of this step: {edge[peak]:,.2f} GiB in use, {phase}",
        ha="left" if x < 0.5 else "right",
        va="top",
        fontsize=9,
        parse_math=False,
    )


def _mib_text(amount_bytes: int) -> str:
    """Return an amount in whole MiB."""
    return f"{ceil_mib(amount_bytes):,} MiB"
