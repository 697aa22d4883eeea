"""A trace as one static page: the picture as inline SVG with a read-out by pointer or arrow keys, tables below, no other host.

It follows the reader's light or dark mode, fits a phone, and says the same in words for those who do not see it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Final

from gpumemnet.trace.answer import TOP_MODULES, TraceAnswer
from gpumemnet.trace.parts import PART_NAMES, shown_mib
from gpumemnet.trace.picture import BANDS, Picture, picture
from gpumemnet.units import ceil_mib

_WIDTH: Final = 1000
_HEIGHT: Final = 420
_LEFT: Final = 64
_TOP: Final = 28
_BOTTOM: Final = 26

_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1a1a1a; --faint: #666; --line: #ccc; --paper: #fff; --panel: #f5f5f5; }
@media (prefers-color-scheme: dark) { :root { --ink: #eee; --faint: #aaa; --line: #444; --paper: #161616; --panel: #222; } }
body { margin: 0 auto; padding: 1rem; max-width: 70rem; font: 16px/1.45 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.25rem; margin: 0 0 .2rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; } p { margin: .2rem 0; }
svg { width: 100%; min-width: 36rem; height: auto; display: block; }
svg text { fill: var(--faint); font: 13px system-ui, sans-serif; }
.plot:focus { outline: 2px solid #0072B2; outline-offset: 2px; }
.axis { stroke: var(--line); } .phase { stroke: var(--faint); stroke-dasharray: 2 3; }
.total { fill: none; stroke: var(--ink); stroke-width: 1.6; }
.safe { stroke: var(--ink); stroke-dasharray: 7 5; } .capacity { stroke: #D55E00; stroke-width: 2; }
.cursor { stroke: var(--ink); }
#read { min-height: 3em; padding: .5rem .7rem; background: var(--panel); border-radius: 6px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; }
td, th { padding: .15rem .9rem .15rem 0; text-align: right; white-space: nowrap; }
td:first-child, th:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere; }
th { color: var(--faint); font-weight: normal; }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .5em; border-radius: 2px; }
"""

_SCRIPT: Final = """
const data = JSON.parse(document.getElementById("data").textContent);
const plot = document.getElementById("plot"), cursor = document.getElementById("cursor"), read = document.getElementById("read");
let at = data.peak;
const mib = bytes => Math.round(bytes / 1048576).toLocaleString("en") + " MiB";
function show(point) {
  at = Math.max(0, Math.min(data.events.length - 1, point));
  const x = data.left + (data.width - data.left) * at / Math.max(1, data.events.length - 1);
  cursor.setAttribute("x1", x); cursor.setAttribute("x2", x);
  let phase = "";
  for (const [name, start] of data.phases) if (start <= at) phase = name;
  const parts = data.names.map((name, band) => [name, data.bands[band][at]]).filter(part => part[1] > 0)
    .map(part => part[0] + " " + mib(part[1]));
  read.textContent = phase + ", event " + data.events[at] + ": " + mib(data.total[at]) + " in nvidia-smi; " + parts.join(", ");
}
plot.addEventListener("pointermove", event => {
  const box = plot.getBoundingClientRect();
  const x = (event.clientX - box.left) / box.width * data.width;
  show(Math.round((x - data.left) / (data.width - data.left) * (data.events.length - 1)));
});
plot.addEventListener("keydown", event => {
  const steps = {ArrowLeft: -1, ArrowRight: 1, PageUp: -25, PageDown: 25, Home: -1e9, End: 1e9};
  if (event.key in steps) { show(at + steps[event.key]); event.preventDefault(); }
});
show(at);
"""


def page(answer: TraceAnswer) -> str:
    """The page of ``answer``.

    Raises:
        InvalidRequestError: when the answer has no curve.
    """
    shown = picture(answer)
    heading = f"{answer.model}, batch size {answer.batch_size}, on {answer.gpu}"
    verdict = "fits" if answer.fits else "may not fit"
    sentence = (
        f"{_mib(answer.expected_bytes)} expected, {_mib(answer.safe_bytes)} safe; {verdict} in {_mib(answer.capacity_bytes)}. "
        f"Peak in step {answer.peak.step}, {answer.peak.phase}: {answer.peak.operator}"
        + (f" in {answer.peak.module}." if answer.peak.module else ".")
    )
    data = {
        "events": shown.events,
        "bands": shown.bands,
        "names": [name for _, name, _ in BANDS],
        "total": shown.total,
        "phases": shown.phases,
        "peak": shown.peak,
        "left": _LEFT,
        "width": _WIDTH,
    }
    colours = {key: colour for key, _, colour in BANDS}
    held = {part: size for part, size in answer.parts.items() if size}
    rows = [
        f'<tr><td><span class="key" style="background:{colours.get(part, "transparent")}"></span>'
        f"{escape(PART_NAMES[part][0])}</td>"
        f"<td>{mib:,} MiB</td><td>{size / answer.expected_bytes:.1%}</td></tr>"
        for (part, size), mib in zip(held.items(), shown_mib(list(held.values())), strict=True)
    ]
    modules = [
        f"<tr><td>{escape(name or '(outside the modules: batch, loss)')}</td><td>{_mib(size)}</td></tr>"
        for name, size in answer.peak.modules[:TOP_MODULES]
    ]
    batches = [
        f"<tr><td>{point.batch_size:,}</td><td>{_mib(point.expected_bytes)}</td><td>{_mib(point.safe_bytes)}</td>"
        f"<td>{'yes' if point.fits else 'no'}</td></tr>"
        for point in answer.batches
    ]
    sections = [
        _table("Memory at the peak", ("", "memory", "share"), rows),
        _table("Modules that hold most at the peak", ("module", "memory"), modules),
    ]
    if batches:
        sections.append(_table("Other batch sizes", ("batch size", "expected", "safe", "fits"), batches))
    notes = "".join(f"<p>{escape(note)}</p>" for note in answer.notes)
    # "</" must not end the script element that carries the data
    embedded = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(heading)}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>{escape(heading)}</h1><p>{escape(sentence)}</p>\n"
        f'<div class="scroll">{_svg(answer, shown, heading)}</div>\n'
        '<p id="read" role="status" aria-live="polite"></p>\n'
        f"{''.join(sections)}{notes}\n"
        f'<script type="application/json" id="data">{embedded}</script>\n'
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _svg(answer: TraceAnswer, shown: Picture, heading: str) -> str:
    highest = max(answer.safe_bytes, *shown.total)
    if answer.capacity_bytes < 1.6 * highest:
        highest = max(highest, answer.capacity_bytes)
    count = len(shown.events)

    def x(point: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT) * point / max(1, count - 1), 1)

    def y(size: float) -> float:
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * size / (1.04 * highest), 1)

    drawn = []
    step = _grid_bytes(highest)
    for size in range(0, int(1.04 * highest) + 1, step):
        drawn.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH}" y1="{y(size)}" y2="{y(size)}"/>')
        drawn.append(f'<text x="{_LEFT - 8}" y="{y(size) + 4}" text-anchor="end">{size / 2**30:g} GiB</text>')
    below = [0] * count
    for (_, name, colour), rows in zip(BANDS, shown.bands, strict=True):
        if not any(rows):
            continue
        above = [base + size for base, size in zip(below, rows, strict=True)]
        outline = [f"{x(i)},{y(size)}" for i, size in enumerate(above)]
        outline += [f"{x(i)},{y(size)}" for i, size in reversed(list(enumerate(below)))]
        drawn.append(f'<polygon fill="{colour}" points="{" ".join(outline)}"><title>{escape(name)}</title></polygon>')
        below = above
    line = " ".join(f"{x(i)},{y(size)}" for i, size in enumerate(shown.total))
    drawn.append(f'<polyline class="total" points="{line}"/>')
    for kind, size, label in (("safe", answer.safe_bytes, "safe"), ("capacity", answer.capacity_bytes, "capacity")):
        if size <= 1.04 * highest:
            drawn.append(f'<line class="{kind}" x1="{_LEFT}" x2="{_WIDTH}" y1="{y(size)}" y2="{y(size)}"/>')
            drawn.append(f'<text x="{_WIDTH - 4}" y="{y(size) - 5}" text-anchor="end">{label} {_mib(size)}</text>')
    for name, start in shown.phases:
        drawn.append(f'<line class="phase" x1="{x(start)}" x2="{x(start)}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        drawn.append(f'<text x="{x(start) + 4}" y="{_TOP - 10}">{escape(name)}</text>')
    drawn.append(
        f'<text x="{_LEFT}" y="{_HEIGHT - 6}">allocations and frees of one training step, in order; '
        "the line is what nvidia-smi shows</text>"
    )
    drawn.append(f'<line id="cursor" class="cursor" x1="0" x2="0" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
    return (
        f'<svg id="plot" class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" tabindex="0" role="img" '
        f'aria-label="Memory over a training step of {escape(heading, quote=True)}; arrow keys move the read-out">'
        f"{''.join(drawn)}</svg>"
    )


def _grid_bytes(highest: int) -> int:
    """Distance of the grid's lines: the power of two that gives between four and eight of them."""
    step = 2**24
    while highest / step > 8:
        step *= 2
    return step


def _table(caption: str, headings: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    return f'<h2>{escape(caption)}</h2><div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _mib(size: int) -> str:
    return f"{ceil_mib(size):,} MiB"
