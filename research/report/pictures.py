"""The pictures of a section, by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.atomic_files import replace_file
from gpumemnet.predict.distribution import PUBLISHED_BINS, BinScheme
from gpumemnet.units import GIB, MIB
from research.report.figures import (
    GIB_BINS,
    INTERVALS,
    MIN_ROWS,
    NO_ANSWER,
    CandidateFigures,
    CoveragePoint,
    Reliability,
    Section,
    judged_rows,
    label_word,
    predicted_bins,
)
from research.report.tables import share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH: Final = 9.0
"""Inches."""
RESOLUTION: Final = 150
OURS: Final = "#0072B2"
COLOURS: Final = ("#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#000000")
FAMILY_COLOURS: Final[Mapping[str, str]] = {
    "mlp": "#0072B2",
    "cnn": "#E69F00",
    "transformer": "#009E73",
}
GREY: Final = "#808080"
MAX_CLASSES: Final = 24
_PHYSICS: Final = "calibrated physics"


def new_figure(height: float) -> Figure:
    """An empty figure of the common width; ``height`` in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def png(figure: Figure) -> bytes:
    """``figure`` as a PNG."""
    content = BytesIO()
    figure.savefig(content, format="png", dpi=RESOLUTION)
    return content.getvalue()


def write_whole(path: Path, content: bytes) -> Path:
    """Write ``content`` to ``path`` atomically."""
    replace_file(path, content)
    return path


def shown_bins(*sections: Section) -> tuple[BinScheme, int]:
    """Bins of 1 GiB where the labels fall into at most 24, else of 8,000 MiB; and the number of
    bins up to the largest label."""
    top = max(
        (
            float(section.label_bytes[np.isfinite(section.label_bytes)].max(initial=0.0))
            for section in sections
        ),
        default=0.0,
    )
    scheme = GIB_BINS if top < MAX_CLASSES * GIB else PUBLISHED_BINS["published-8000mib"]
    return scheme, int(scheme.index(top)) + 1


def width_name(scheme: BinScheme) -> str:
    """A bin's width for a person."""
    return "1 GiB" if scheme is GIB_BINS else f"{scheme.width_bytes // MIB:,} MiB"


def baselines(section: Section, figures: Mapping[str, CandidateFigures]) -> list[str]:
    """Two candidates to draw beside the section's own: calibrated physics, and the best of the
    others by median error.

    Variants of the section's own candidate are excluded.
    """
    others = [
        each
        for each in figures
        if not each.startswith(section.candidate) and not np.isnan(figures[each].median_error)
    ]
    others.sort(key=lambda each: (not each.startswith(_PHYSICS), figures[each].median_error))
    return others[:2]


def amount(value_bytes: float) -> str:
    """An amount on an axis."""
    return f"{value_bytes / GIB:.3g} GiB" if value_bytes >= GIB else f"{value_bytes / MIB:.3g} MiB"


def memory_axis(axis: Any) -> None:
    """Octaves, written out, on a logarithmic axis of bytes."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(base=2, numticks=8))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: amount(value)))


def shortened(names: Sequence[str], most: int = 34) -> list[str]:
    """Names that fit into a legend."""
    return [name if len(name) <= most else f"{name[: most - 1]}…" for name in names]


_MAX_POINTS: Final = 4_000


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


_FAMILY_MARKERS: Final = {"mlp": "o", "cnn": "s", "transformer": "^"}


def reliability_picture(candidate: str, reliability: Reliability) -> Figure:
    """Accuracy against confidence; below it, the number of jobs by confidence."""
    figure = new_figure(5.0)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1.0))
    edges = np.arange(INTERVALS) / INTERVALS
    upper.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1, label="confidence = accuracy")
    jobs = np.array(reliability.jobs)
    occupied = jobs > 0
    confidence, accuracy = (
        np.array(reliability.confidence)[occupied],
        np.array(reliability.accuracy)[occupied],
    )
    upper.vlines(
        confidence,
        np.minimum(confidence, accuracy),
        np.maximum(confidence, accuracy),
        color=GREY,
        linewidth=1,
    )
    upper.plot(confidence, accuracy, "o-", color=OURS, label=candidate)
    few = jobs[occupied] < MIN_ROWS
    if few.any():
        style = {"markerfacecolor": "white", "color": OURS, "label": f"fewer than {MIN_ROWS} jobs"}
        upper.plot(confidence[few], accuracy[few], "o", **style)
    upper.set(ylim=(-0.02, 1.04), ylabel="accuracy, bins of 1 GiB")
    upper.set_title(
        f"expected calibration error {share(reliability.expected_calibration_error, 2)}, {jobs.sum():,} jobs"
    )
    upper.legend(frameon=False, loc="upper left")
    lower.bar(edges, jobs, 1 / INTERVALS, align="edge", color=OURS, edgecolor="white")
    lower.set_yscale("symlog", linthresh=1)
    lower.set(xlim=(0, 1), xlabel="confidence: probability of the most probable bin", ylabel="jobs")
    return figure


def coverage_picture(candidate: str, points: Sequence[CoveragePoint]) -> Figure:
    """Left: coverage of all bounds against their nominal coverage.  Right: the corner above 90 %,
    with 95 % intervals."""
    figure = new_figure(4.2)
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1)
        axes.set(xlabel="coverage promised", aspect="equal")
    for index, family in enumerate(dict.fromkeys(point.family for point in points)):
        selected = [point for point in points if point.family == family]
        for axes, shift in ((left, 0.0), (right, 0.0006 * (index - 1))):
            _draw_family(axes, family, selected, shift)
    low = min([0.85, *(point.interval[0] for point in points if point.nominal >= 0.9)])
    left.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), ylabel="share of jobs at or below the bound")
    right.set(xlim=(0.895, 1.003), ylim=(max(0.0, low) - 0.005, 1.003), aspect="auto")
    left.set_title(candidate)
    right.set_title("above 90 %, with 95 % intervals")
    left.legend(frameon=False, loc="upper left")
    return figure


def _draw_family(axes: Axes, family: str, points: Sequence[CoveragePoint], shift: float) -> None:
    nominal = [point.nominal + shift for point in points]
    empirical = np.array([point.empirical for point in points])
    ends = np.array([point.interval for point in points]).T
    axes.errorbar(
        nominal,
        empirical,
        np.maximum(np.abs(ends - empirical), 0.0),
        marker=_FAMILY_MARKERS[family],
        color=FAMILY_COLOURS[family],
        markersize=5,
        linewidth=1.2,
        elinewidth=1,
        capsize=2,
        label=f"{family} ({max(point.jobs for point in points):,} jobs)",
    )


def confusion_picture(section: Section) -> Figure | None:
    """Bins of the labels (rows) against those of the candidate (columns), counts in the cells;
    ``None`` without answers.

    Colour is the share of each row, because most jobs are small and counts would leave the rows of
    large jobs pale.
    """
    scheme, classes = shown_bins(section)
    rows = judged_rows(section)
    predicted = predicted_bins(section.answers[section.candidate], scheme)[rows]
    answered = predicted != NO_ANSWER
    if not answered.any():
        return None
    square = confusion(section.label_bytes[rows][answered], predicted[answered], scheme)
    right = square.diagonal().sum() / len(rows)
    counts, names = square[:classes, :classes], [str(index) for index in range(classes)]
    columns = list(names)
    if len(square) > classes:
        counts, columns = (
            np.column_stack([counts, square[:classes, classes:].sum(axis=1)]),
            [*names, "above"],
        )
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    figure = new_figure(max(4.6, 1.6 + 0.27 * classes))
    figure.set_layout_engine("compressed")
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    size = 9 if classes <= 12 else 6.5
    for row, column in zip(*counts.nonzero(), strict=True):
        colour = "white" if shares[row, column] > 0.5 else "black"
        axes.text(
            column,
            row,
            f"{counts[row, column]:,}",
            ha="center",
            va="center",
            color=colour,
            fontsize=size,
        )
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(classes), names)
    if len(columns) > classes:
        axes.get_xticklabels()[-1].set_rotation(90)
    axes.set(xlabel=f"bin of {section.candidate}", ylabel=f"bin of the {label_word(section)} label")
    title = f"bins of {width_name(scheme)}, bin k from k times that width: {share(right)} of {len(rows):,} jobs right"
    figure.suptitle(title, fontsize=11)
    figure.colorbar(image, ax=axes, label="share of the row", shrink=0.8, pad=0.02)
    return figure


def confusion(
    label_bytes: NDArray[np.float64], predicted: NDArray[np.int64], scheme: BinScheme
) -> NDArray[np.int64]:
    """Counts of measured (rows) against predicted (columns) bins, up to the highest that occurs;
    square."""
    measured = scheme.index(label_bytes)
    size = int(max(measured.max(), predicted.max())) + 1
    counts = np.zeros((size, size), dtype=np.int64)
    np.add.at(counts, (measured, predicted), 1)
    return counts
