"""Writes the result of a trace as one static HTML page with tables and an inline SVG chart.

The pointer and the arrow keys show the chart's values.  The page loads nothing from other hosts,
supports light and dark mode, and fits a phone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from itertools import groupby
from typing import Final

from gpumemnet.gpu.available import VERDICT_TEXTS
from gpumemnet.tracing.report.answer import TraceAnswer
from gpumemnet.tracing.report.parts import PART_NAMES, TOP_MODULES, shown_mib
from gpumemnet.tracing.report.picture import COLOURS, Picture, peak_lines, title_of
from gpumemnet.units import GIB, ceil_mib

WIDTH, HEIGHT = 1000, 400
"""Size of the SVG in its coordinates."""
HEADROOM: Final = 1.06
_LABELLED_WIDTH: Final = 0.05
_LABEL_HEIGHT: Final = 0.06
"""Share of the chart's height within which the labels of two lines would overlap; the lower line
then has its label below."""
_NEAR: Final = 0.09
"""Labels of the batch axis overlap if they are closer than this share of its width."""


def page(answer: TraceAnswer, picture: Picture) -> str:
    """Return the HTML page for ``answer`` with the chart ``picture``."""
    sections = [
        f'<div class="together"><div>{step_chart(answer, picture, HEADROOM * picture.top_bytes, has_pointer=True)}</div>'
        f"<div>{_breakdown(answer, picture)}</div></div>",
        _modules(answer),
        _batches(answer) if answer.batches else "",
        _assumptions(answer),
    ]
    script = resources.files("gpumemnet.tracing.report").joinpath("plot_page.js").read_text("utf-8")
    data = f'<script type="application/json" id="data">{_data(picture)}</script>\n<script>\n{script}</script>'
    return html_page(title_of(answer), _verdict(answer), [*filter(None, sections), data])


def html_page(title: str, first_line: str, sections: Sequence[str]) -> str:
    """Return an HTML page that loads nothing: a heading, one line in words, and sections of
    HTML."""
    style = resources.files("gpumemnet.tracing.report").joinpath("plot_page.css").read_text("utf-8")
    colours = "".join(f"--{part.replace('_', '-')}: {colour};" for part, colour in COLOURS.items())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>:root {{ {colours} }}\n{style}</style></head><body>\n"
        f"<h1>{escape(title)}</h1>\n<p>{escape(first_line)}</p>\n"
        f"{chr(10).join(sections)}</body></html>\n"
    )


def _verdict(answer: TraceAnswer) -> str:
    verdict = f"{VERDICT_TEXTS[answer.verdict]} in {_mib(answer.available_bytes)}"
    return f"{_mib(answer.expected_bytes)} expected, {_mib(answer.safe_bytes)} safe: {verdict}."


def step_chart(
    answer: TraceAnswer, picture: Picture, top_bytes: float, *, has_pointer: bool
) -> str:
    """Return the chart of a step as HTML.

    Args:
        answer: the answer.
        picture: its chart.
        top_bytes: height of the chart in bytes.
        has_pointer: whether the page's script shows the values under the pointer; one chart of a
            page can have that.
    """
    top = top_bytes
    shapes, words = grid(top)
    # from the top band down, each filled to zero: one edge instead of two, and no gaps between
    # adjacent bands
    for band, edge in reversed(list(zip(picture.bands, picture.edges_bytes, strict=True))):
        shapes.append(
            f'<path style="fill:var(--{band.part.replace("_", "-")})" d="M0 {HEIGHT}{_stairs(picture, edge, top)}V{HEIGHT}Z"/>'
        )
    reserved = _stairs(picture, picture.reserved_bytes, top)
    shapes.insert(0, f'<path style="fill:var(--unused)" d="M0 {HEIGHT}{reserved}V{HEIGHT}Z"/>')
    for phase in picture.phases:
        if phase.start > 0:
            shapes.append(svg_line("cut", phase.start, phase.start, 0, HEIGHT))
        if phase.end - phase.start >= _LABELLED_WIDTH:
            style = f"left:{phase.start:.2%};width:{phase.end - phase.start:.2%}"
            words.append(f'<span class="phase" style="{style}">{escape(phase.name)}</span>')
    shapes.append(f'<path class="drawn" d="M0 {_y(picture.reserved_bytes[0], top)}{reserved}"/>')
    lines = [("safe", answer.safe_bytes)]
    if picture.available_bytes is not None:
        lines.append(("available", picture.available_bytes))
    is_crowded = len(lines) > 1 and abs(lines[0][1] - lines[1][1]) < _LABEL_HEIGHT * top
    for name, size in lines:
        side = "line below" if is_crowded and size == min(each for _, each in lines) else "line"
        shapes.append(svg_line(name, 0, 1, _y(size, top), _y(size, top)))
        words.append(
            f'<span class="{side}" style="top:{1 - size / top:.2%}">{name} {_mib(size)}</span>'
        )
    x, used = picture.peak_position, picture.edges_bytes[-1][picture.peak]
    side = (
        f"left:{x:.2%};max-width:{1 - x:.2%}" if x < 0.5 else f"right:{1 - x:.2%};max-width:{x:.2%}"
    )
    what, source = (escape(each) for each in peak_lines(answer, picture))
    words.append(f'<span class="callout" style="{side}" title="{source}">{what}<br>{source}</span>')
    dot = f'<span class="dot" style="left:{x:.2%};top:{1 - used / top:.2%}"></span>'
    if not has_pointer:
        return f'<div class="chart" role="img" aria-label="Memory over a training step">{svg(shapes)}{"".join(words)}{dot}</div>'
    words.append('<span id="cursor" class="cursor"></span>')
    words.append(dot)
    return (
        f'<div id="plot" class="chart" tabindex="0" role="slider" aria-valuemin="0" aria-valuemax="{len(picture.events) - 1}" '
        f'aria-valuenow="{picture.peak}" aria-label="Memory over a training step; arrow keys move the read-out">'
        f"{svg(shapes)}{''.join(words)}</div>"
        '<p class="quiet">GiB over the allocations and frees of one training step, in order; each phase to its own scale. '
        "The upper edge is what nvidia-smi shows. Point at the picture, or use the arrow keys.</p>"
    )


def _breakdown(answer: TraceAnswer, picture: Picture) -> str:
    """Return the table of parts in the chart's order, with their memory at the run's peak and at
    the pointer."""
    shown = {band.part for band in picture.bands}
    parts = [
        "fragmentation",
        *(part for part in reversed(COLOURS) if answer.parts.get(part) or part in shown),
    ]
    amounts = [answer.parts.get(part, 0) for part in parts]
    rows = []
    for part, size, mib in zip(parts, amounts, shown_mib(amounts), strict=True):
        name = PART_NAMES[part][0]
        colour = "unused" if part == "fragmentation" else part.replace("_", "-")
        here = (
            f'<td data-row data-name="{name}"></td>'
            if part in shown or part == "fragmentation"
            else "<td>0</td>"
        )
        rows.append(
            f'<tr title="{PART_NAMES[part][1]}"><td><i class="key" style="background:var(--{colour})"></i>{name}</td>'
            f"<td>{mib:,}</td><td>{size / answer.expected_bytes:.1%}</td>{here}</tr>"
        )
    rows.append(
        f'<tr class="sum"><td>in nvidia-smi</td><td>{ceil_mib(answer.expected_bytes):,}</td><td></td>'
        '<td data-row data-name="in nvidia-smi"></td></tr>'
    )
    table = html_table("Memory at the peak, MiB", ("", "peak", "share", "pointer"), rows)
    return f'{table}<p class="quiet">Pointer: <span id="where"></span></p>'


def _modules(answer: TraceAnswer) -> str:
    rows = [
        f"<tr><td>{escape(name or '(the model itself, loss)')}</td><td>{_mib(size)}</td>"
        f"<td>{size / answer.expected_bytes:.1%}</td></tr>"
        for name, size in answer.peak.modules[:TOP_MODULES]
    ]
    return html_table("Modules that hold most at the peak", ("module", "memory", "share"), rows)


def _batches(answer: TraceAnswer) -> str:
    points = sorted(answer.batches, key=lambda point: point.batch_size)
    most, largest = max(point.safe_bytes for point in points), points[-1].batch_size
    is_available_drawn = answer.available_bytes < 2 * most
    top = HEADROOM * max(most, answer.available_bytes if is_available_drawn else 0)
    shapes, words = grid(top)
    places = [point.batch_size / largest for point in points]
    for name, sizes in (
        ("drawn", [p.expected_bytes for p in points]),
        ("safe", [p.safe_bytes for p in points]),
    ):
        corners = " ".join(
            f"{x * WIDTH:.1f},{_y(size, top)}" for x, size in zip(places, sizes, strict=True)
        )
        shapes.append(f'<polyline class="{name}" points="{corners}"/>')
    if is_available_drawn:
        shapes.append(
            svg_line(
                "available", 0, 1, _y(answer.available_bytes, top), _y(answer.available_bytes, top)
            )
        )
        words.append(
            f'<span class="line" style="top:{1 - answer.available_bytes / top:.2%}">available</span>'
        )
    rows, free = [], 1.0 + _NEAR
    for point, x in reversed(list(zip(points, places, strict=True))):
        kind = "dot" if point.traced else "dot interpolated"
        words.append(
            f'<span class="{kind}" style="left:{x:.2%};top:{1 - point.expected_bytes / top:.2%}"></span>'
        )
        if free - x >= _NEAR:
            words.append(f'<span class="x" style="left:{x:.2%}">{point.batch_size:,}</span>')
            free = x
        source = "traced" if point.traced else "interpolated"
        rows.append(
            f"<tr><td>{point.batch_size:,}</td><td>{_mib(point.expected_bytes)}</td><td>{_mib(point.safe_bytes)}</td>"
            f"<td>{VERDICT_TEXTS[point.verdict]}</td><td>{source}</td></tr>"
        )
    table = html_table("", ("batch size", "expected", "safe", "verdict", ""), rows[::-1])
    return (
        '<h2>Other batch sizes</h2><div class="together"><div><div class="chart low" role="img" '
        f'aria-label="Memory over batch size; the table says the same">{svg(shapes)}{"".join(words)}</div>'
        '<p class="quiet">GiB over batch size: line expected, dashes safe; a full dot was traced, '
        f"a hollow one is interpolated from two others.</p></div><div>{table}</div></div>"
    )


def _assumptions(answer: TraceAnswer) -> str:
    facts = [
        f"Loss: {answer.loss}",
        f"CUDA context: {answer.context_source}",
        f"Safe: {answer.safe_basis}",
        f"Least memory in which the job still runs: {_mib(answer.smallest_bytes)}",
        *answer.notes,
    ]
    rest = f"<h2>Not included</h2>{bullets(answer.not_included)}" if answer.not_included else ""
    return f"<h2>What this rests on</h2>{bullets(facts)}{rest}"


def _data(picture: Picture) -> str:
    """Return the JSON that the page's script reads; its rows have the order of the table of
    parts."""
    document = {
        "events": picture.events,
        "positions": [round(position, 5) for position in picture.positions],
        "phases": [phase.name for phase in picture.phases],
        "phase_of": picture.phase_of,
        "peak": picture.peak,
        "rows": [picture.unused_bytes, *(band.moments_bytes for band in reversed(picture.bands))],
    }
    # otherwise "</" could end the script element that holds the data, and "<!--" could start a
    # comment in it
    return json.dumps(document, separators=(",", ":")).replace("<", "\\u003c")


def grid(top_bytes: float) -> tuple[list[str], list[str]]:
    """Return grid lines and labels at round amounts."""
    distance = next(step for step in _round_steps() if top_bytes / step <= 7)
    shapes, words = [], []
    for line in range(int(top_bytes / distance) + 1):
        size = line * distance
        shapes.append(svg_line("rule", 0, 1, _y(size, top_bytes), _y(size, top_bytes)))
        words.append(
            f'<span class="y" style="top:{1 - size / top_bytes:.2%}">{size / GIB:g}</span>'
        )
    return shapes, words


def _round_steps() -> Iterable[float]:
    scale = 0.01
    while True:
        yield from (factor * scale * GIB for factor in (1, 2, 5))
        scale *= 10


def _stairs(picture: Picture, sizes: Sequence[int], top_bytes: float) -> str:
    """Return SVG path commands along ``sizes``; consecutive points of equal height share one
    segment."""
    moments = zip(picture.positions, (_y(size, top_bytes) for size in sizes), strict=False)
    stairs = [(next(group)[0], y) for y, group in groupby(moments, key=lambda moment: moment[1])]
    return "".join(f"H{x * WIDTH:.1f}V{y}" for x, y in stairs) + f"H{WIDTH}"


def _y(size: float, top_bytes: float) -> str:
    return f"{HEIGHT * (1 - size / top_bytes):.1f}"


def svg_line(kind: str, x1: float, x2: float, y1: float | str, y2: float | str) -> str:
    """Return a line of SVG; ``x`` from 0 to 1, ``y`` in the coordinates of the SVG."""
    return f'<line class="{kind}" x1="{x1 * WIDTH:.1f}" x2="{x2 * WIDTH:.1f}" y1="{y1}" y2="{y2}"/>'


def svg(shapes: Sequence[str]) -> str:
    """Return shapes as an SVG that fills its box."""
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">{"".join(shapes)}</svg>'


def html_table(caption: str, headings: Sequence[str], rows: Sequence[str]) -> str:
    """Return a table as HTML; ``rows`` are HTML too."""
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    above = f"<h2>{caption}</h2>" if caption else ""
    return f"{above}<table><tr>{head}</tr>{''.join(rows)}</table>"


def bullets(items: Sequence[str]) -> str:
    """Return texts as a list of HTML."""
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _mib(size: int) -> str:
    return f"{ceil_mib(size):,} MiB"
