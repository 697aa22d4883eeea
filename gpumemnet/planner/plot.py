"""Draws a plan: the memory over a step before and after, and the modelled time against the memory
for every search.

The file's suffix selects the format, as for a trace: matplotlib draws PNG, SVG and PDF.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.planner.answer import DECISION_TEXTS, PlanAnswer, SearchPoint, units_by_decision
from gpumemnet.tracing.plot import (
    AVAILABLE,
    COLOURS,
    DASHES,
    INK,
    QUIET,
    UNUSED,
    StepChart,
    draw_step,
    step_chart,
    title_of,
    top_bytes,
    write_picture,
)
from gpumemnet.tracing.plot import plot as plot_trace
from gpumemnet.tracing.result import PART_NAMES, TraceAnswer
from gpumemnet.units import GIB, ceil_mib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE_INCHES: Final = (12.0, 8.0)
_COLOURS: Final = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#999999",
    "#661100",
    "#332288",
)
"""Colours of the searches, of Okabe and Ito and of Tol for colour-blind readers."""
_MARKERS: Final = "osD^vP*X<>"
_MARGIN: Final = 0.05
_USUAL: Final = ("greedy", "exact", "swarm")
_HIGHEST: Final = 2.0
"""Plans slower than so many times the slowest of the usual searches are not drawn."""
_LOWEST_END: Final = 0.02
"""Share of a step that the axis of times shows at least."""


def plot(answer: PlanAnswer, path: Path) -> None:
    """Write the picture of ``answer`` to ``path`` atomically; of a job without a plan, the memory
    over its step alone.

    Args:
        answer: a plan of which the step's memory was requested.
        path: a file that ends in ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        InvalidRequestError: another suffix, an answer without curves, or a file that cannot be
            written.
        MissingExtraError: matplotlib is needed and not installed.
    """
    after = answer.after
    if after is None:
        plot_trace(answer.before, path)
        return
    if answer.before.curve is None or after.curve is None:
        raise InvalidRequestError("the answer has no curves; plan with with_searches", "plot")
    charts = (step_chart(answer.before), step_chart(after))
    write_picture(
        path,
        lambda figure: _draw(figure, answer, after, charts),
        _SIZE_INCHES,
    )


def _title(answer: PlanAnswer) -> tuple[str, str]:
    before, after, plan = answer.before, answer.after, answer.plan
    assert after is not None
    assert plan is not None
    amounts = f"{_mib(after.expected_bytes)} expected, {_mib(after.safe_bytes)} safe instead of {_mib(before.safe_bytes)}"
    step = f"step {100 * plan.slowdown:+.1f} % (modelled)"
    return title_of(before), f"fits by a plan in {_mib(answer.budget_bytes)}: {amounts}, {step}"


def _decisions(answer: PlanAnswer) -> list[tuple[str, str]]:
    assert answer.plan is not None
    return [
        (DECISION_TEXTS[decision], units)
        for decision, units in units_by_decision(answer.plan).items()
    ]


def _by_search(answer: PlanAnswer) -> dict[str, list[SearchPoint]]:
    found: dict[str, list[SearchPoint]] = {}
    for point in answer.searches:
        found.setdefault(point.optimizer, []).append(point)
    return {
        name: sorted(points, key=lambda point: point.process_bytes)
        for name, points in found.items()
    }


def _highest_slowdown(answer: PlanAnswer) -> float:
    """Return where the axis of times ends: at the slowest plan that is not far above those of the
    usual searches."""
    plan = answer.plan
    assert plan is not None
    usual = [
        plan.slowdown,
        *(point.slowdown for point in answer.searches if point.optimizer in _USUAL),
    ]
    drawn = (point.slowdown for point in answer.searches if point.slowdown <= _HIGHEST * max(usual))
    return max(_LOWEST_END, *usual, *drawn)


def _draw(
    figure: Figure, answer: PlanAnswer, after: TraceAnswer, charts: tuple[StepChart, StepChart]
) -> None:
    highest = max(top_bytes(answer.before), top_bytes(after))
    title, line = _title(answer)
    figure.text(0.05, 0.962, title, fontsize=13, fontweight="bold", parse_math=False)
    figure.text(0.05, 0.932, line, fontsize=10.5, color=QUIET, parse_math=False)
    for left, heading, trace, chart in (
        (0.05, "as it is", answer.before, charts[0]),
        (0.53, "with the plan", after, charts[1]),
    ):
        axes = figure.add_axes((left, 0.50, 0.42, 0.35))
        draw_step(axes, trace, chart, highest)
        axes.set_title(heading, loc="left", fontsize=10.5, fontweight="bold", pad=18)
        axes.set_xlabel("allocations and frees of one training step, in order", color=QUIET)
    _draw_searches(figure.add_axes((0.05, 0.065, 0.42, 0.335)), answer)
    _draw_legend(figure.add_axes((0.53, 0.03, 0.45, 0.40)), answer, charts)


def _draw_searches(axes: Axes, answer: PlanAnswer) -> None:
    plan = answer.plan
    assert plan is not None
    slowest = _highest_slowdown(answer)
    for (name, points), colour, marker in zip(
        _by_search(answer).items(), _COLOURS, _MARKERS, strict=False
    ):
        drawn = [point for point in points if point.slowdown <= slowest]
        if not drawn:
            continue
        memory, extra = (
            [point.process_bytes / GIB for point in drawn],
            [100 * point.slowdown for point in drawn],
        )
        axes.plot(
            memory,
            extra,
            color=colour,
            marker=marker,
            markersize=4.5,
            linewidth=1.1,
            label=name,
            alpha=0.85,
        )
    axes.plot(
        plan.process_bytes / GIB,
        100 * plan.slowdown,
        "o",
        markersize=13,
        markerfacecolor="none",
        color="black",
        label="this plan",
    )
    axes.axvline(answer.budget_bytes / GIB, color=AVAILABLE, linewidth=1.6)
    axes.set_xlabel("peak memory of the process, GiB (line: available)", color=QUIET)
    axes.set_ylabel("longer step, %, modelled")
    axes.set_title("every search at several budgets", loc="left", fontsize=10.5, fontweight="bold")
    axes.legend(framealpha=0.85, edgecolor="none", fontsize=8.5, ncols=2)
    axes.set_ylim(-100 * _MARGIN * slowest, 105 * slowest)


def _draw_legend(axes: Axes, answer: PlanAnswer, charts: tuple[StepChart, StepChart]) -> None:
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    shown = {part for chart in charts for part in chart.bands}
    entries = [
        (PART_NAMES["fragmentation"][0], UNUSED),
        *((PART_NAMES[part][0], COLOURS[part]) for part in reversed(COLOURS) if part in shown),
    ]
    for index, (name, colour) in enumerate(entries):
        column, row = divmod(index, (len(entries) + 1) // 2)
        x, y = 0.5 * column, 0.97 - 0.075 * row
        axes.fill_between([x, x + 0.05], y - 0.02, y + 0.02, color=colour, linewidth=0)
        axes.text(x + 0.07, y, name, va="center")
    y = 0.97 - 0.075 * ((len(entries) + 1) // 2)
    for x, name, colour, dashes in (
        (0.0, "nvidia-smi shows", INK, "solid"),
        (0.37, "safe", INK, DASHES),
        (0.58, "available", AVAILABLE, "solid"),
    ):
        axes.plot([x, x + 0.05], [y, y], color=colour, linewidth=1.6, linestyle=dashes)
        axes.text(x + 0.07, y, name, va="center")
    y -= 0.1
    for name, units in _decisions(answer):
        axes.text(0, y, name, va="top", fontweight="bold")
        lines = _wrapped(units, 42, 4)
        axes.text(0.45, y, "\n".join(lines), va="top", linespacing=1.3, parse_math=False)
        y -= 0.052 * len(lines) + 0.03


def _wrapped(text: str, width: int, most: int) -> list[str]:
    """Return ``text`` in lines of ``width`` characters, ``most`` of them at most."""
    lines = wrap(text, width, break_long_words=True)
    return lines if len(lines) <= most else [*lines[: most - 1], f"{lines[most - 1][: width - 1]}…"]


def _mib(size: int) -> str:
    return f"{ceil_mib(size):,} MiB"
