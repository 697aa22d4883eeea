"""Draws a trace: the memory over one training step, stacked by class, as a picture or as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from gpumemnet.errors import InvalidRequestError, MissingExtraError
from gpumemnet.layers import describe
from gpumemnet.trace.answer import TraceAnswer
from gpumemnet.trace.picture import BANDS, picture
from gpumemnet.trace.plot_html import page
from gpumemnet.units import GIB, MIB, ceil_mib

PICTURES: Final = (".png", ".svg", ".pdf")
_DOTS_PER_INCH: Final = 110


def plot(answer: TraceAnswer, path: Path) -> None:
    """Write the picture of ``answer`` to ``path``: ``.html``, or ``.png``, ``.svg``, ``.pdf`` by matplotlib.

    Raises:
        InvalidRequestError: another suffix, or an answer without a curve.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix not in (*PICTURES, ".html"):
        raise InvalidRequestError(f"must end in .html or {', '.join(PICTURES)}, not {describe(path.name)}", "plot")
    part = path.with_name(f"{path.name}.part")
    if path.suffix == ".html":
        part.write_text(page(answer), encoding="utf-8")
    else:
        _draw(answer, part, path.suffix.removeprefix("."))
    part.replace(path)


def title(answer: TraceAnswer) -> tuple[str, str]:
    """What was traced, and the answer in a sentence."""
    return (
        f"{answer.model}, batch size {answer.batch_size}, on {answer.gpu}",
        f"{ceil_mib(answer.expected_bytes):,} MiB expected, {ceil_mib(answer.safe_bytes):,} MiB safe, "
        f"of {ceil_mib(answer.capacity_bytes):,} MiB",
    )


def _draw(answer: TraceAnswer, path: Path, form: str) -> None:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtraError("matplotlib", "plot", "drawing a trace") from None

    shown = picture(answer)
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.add_subplot()
    times = list(shown.events)
    labels = [
        f"{name}  {rows[shown.peak] / MIB:,.0f} MiB" for (_, name, _), rows in zip(BANDS, shown.bands, strict=True) if any(rows)
    ]
    bands = [(rows, colour) for (_, _, colour), rows in zip(BANDS, shown.bands, strict=True) if any(rows)]
    axes.stackplot(
        times,
        [[value / GIB for value in rows] for rows, _ in bands],
        colors=[colour for _, colour in bands],
        labels=labels,
        linewidth=0,
        step="post",
    )
    total = [value / GIB for value in shown.total]
    axes.step(times, total, where="post", color="black", linewidth=1.4, label="reserved + context (nvidia-smi)")
    axes.axhline(answer.safe_bytes / GIB, color="black", linestyle="--", linewidth=1, label="safe")
    highest = max(answer.safe_bytes / GIB, *total)
    if answer.capacity_bytes / GIB < 1.6 * highest:
        axes.axhline(answer.capacity_bytes / GIB, color="#D55E00", linewidth=1.4, label=f"{answer.gpu}: capacity")
        highest = max(highest, answer.capacity_bytes / GIB)
    axes.set_ylim(0, 1.14 * highest)
    axes.set_xlim(times[0], times[-1])
    for name, start in shown.phases:
        axes.axvline(times[start], color="#666666", linewidth=0.8, linestyle=":")
        axes.text(times[start], 1.13 * highest, f" {name}", va="top", fontsize=10, color="#444444")
    height = sum(rows[shown.peak] for rows, _ in bands) / GIB
    late = shown.peak > 0.6 * len(times)
    axes.annotate(
        f"peak: {answer.peak.operator}\n{answer.peak.module or '(outside the modules)'}",
        (times[shown.peak], height),
        xytext=(-70 if late else 30, 22),
        textcoords="offset points",
        fontsize=9,
        arrowprops={"arrowstyle": "->", "color": "black"},
        bbox={"boxstyle": "round", "facecolor": "white", "alpha": 0.85, "edgecolor": "#999999"},
    )
    heading, sentence = title(answer)
    axes.set_title(f"{heading}\n{sentence}", loc="left", fontsize=12)
    axes.set_xlabel("allocations and frees of one training step, in order")
    axes.set_ylabel("GiB")
    handles, names = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside right upper", fontsize=9, title="at the peak", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format=form, dpi=_DOTS_PER_INCH)
