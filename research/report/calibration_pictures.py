"""Pictures of calibration: the reliability diagram of a candidate's bins, and the coverage of its
bounds.

A point on the dashed line is calibrated; below the line the candidate is overconfident.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from .calibration import INTERVALS, CoveragePoint, Reliability
from .canvas import FAMILY_COLOURS, GREY, OURS, new_figure
from .groups import MIN_ROWS
from .tables import share

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKERS: Final = {"mlp": "o", "cnn": "s", "transformer": "^"}


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
    lower.set_yticks(
        [
            0,
            1,
            *(
                10**power
                for power in range(1, 1 + len(str(jobs.max())))
                if 10**power <= 10 * jobs.max()
            ),
        ]
    )
    lower.minorticks_off()
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
        marker=_MARKERS[family],
        color=FAMILY_COLOURS[family],
        markersize=5,
        linewidth=1.2,
        elinewidth=1,
        capsize=2,
        label=f"{family} ({max(point.jobs for point in points):,} jobs)",
    )
