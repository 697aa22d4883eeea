"""Draws a plan: the memory over a step as it is and with the plan, and what each module does.

The file's suffix selects the format, as for a trace.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.planner.plans import DECISION_TEXTS, PlanAnswer, units_by_decision
from gpumemnet.tracing.plot import (
    QUIET,
    draw_step,
    mib_text,
    step_chart,
    title_of,
    top_bytes,
    write_picture,
)
from gpumemnet.tracing.plot import plot as plot_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIZE_INCHES: Final = (12.0, 6.5)


def plot(answer: PlanAnswer, path: Path) -> None:
    """Write the picture of ``answer`` to ``path`` atomically; of a job without a plan, the memory
    over its step alone.

    Args:
        answer: a plan of which the step's memory was requested.
        path: a file that ends in ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        InvalidRequestError: another suffix, an answer without curves, or a file that cannot be
            written.
        MissingExtraError: matplotlib is not installed.
    """
    before, after, plan = answer.before, answer.after, answer.plan
    if after is None or plan is None:
        plot_trace(before, path)
        return
    if before.curve is None or after.curve is None:
        raise InvalidRequestError("the answer has no curves; plan with with_curves", "plot")
    line = (
        f"fits by a plan in {mib_text(answer.budget_bytes)}: {mib_text(after.expected_bytes)} expected, "
        f"{mib_text(after.safe_bytes)} safe instead of {mib_text(before.safe_bytes)}, "
        f"step {100 * plan.slowdown:+.1f} % (modelled)"
    )
    words = [
        fill(shorten(f"{DECISION_TEXTS[decision]}: {units}", 120, placeholder=" …"), 68)
        for decision, units in units_by_decision(plan).items()
    ]

    def draw(figure: Figure) -> None:
        figure.text(0.05, 0.95, title_of(before), fontsize=13, fontweight="bold", parse_math=False)
        figure.text(0.05, 0.91, line, fontsize=10.5, color=QUIET, parse_math=False)
        highest_bytes = max(top_bytes(before), top_bytes(after))
        for left, heading, trace in ((0.05, "as it is", before), (0.53, "with the plan", after)):
            axes = figure.add_axes((left, 0.36, 0.42, 0.45))
            draw_step(axes, trace, step_chart(trace), highest_bytes)
            axes.set_title(heading, loc="left", fontsize=10.5, fontweight="bold", pad=18)
            axes.set_xlabel("allocations and frees of one training step, in order", color=QUIET)
        axes.legend(
            title="MiB at the peak with the plan",
            loc="upper right",
            ncols=3,
            frameon=False,
            bbox_to_anchor=(1, -0.12),
            reverse=True,
        )
        text = "\n".join(words)
        figure.text(0.05, 0.28, text, va="top", fontsize=8.5, linespacing=1.4, parse_math=False)

    write_picture(path, draw, _SIZE_INCHES)
