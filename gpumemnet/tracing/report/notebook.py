"""Renders the result of a trace as a compact HTML table for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

from gpumemnet.gpu.verdict import VERDICT_TEXTS
from gpumemnet.tracing.report.answer import TOP_MODULES, TraceAnswer
from gpumemnet.tracing.report.parts import PART_NAMES, shown_mib
from gpumemnet.units import GIB, ceil_mib

_STYLE: Final = "text-align:left"


def table(answer: TraceAnswer) -> str:
    """Return the answer as HTML: expected and safe bytes, parts, peak and notes; all text is escaped."""
    gpu = answer.gpu if answer.ranks == 1 else f"one of {answer.ranks:,} x {answer.gpu}"
    caption = f"{answer.model}, batch size {answer.batch_size:,}, on {gpu}"
    totals = [
        ("expected", f"{_gib(answer.expected_bytes)}"),
        ("safe", f"{_gib(answer.safe_bytes)}"),
        ("available", f"{_gib(answer.available_bytes)}: {VERDICT_TEXTS[answer.verdict]}"),
    ]
    held = [(part, size) for part, size in answer.parts.items() if size]
    parts = [
        (PART_NAMES[part][0], f"{amount:,} MiB")
        for (part, _), amount in zip(held, shown_mib([size for _, size in held]), strict=True)
    ]
    module = f" in {answer.peak.module}" if answer.peak.module else ""
    peak = [("peak", f"{answer.peak.phase}, {answer.peak.operator}{module}")]
    modules = [(name or "(model)", f"{ceil_mib(size):,} MiB") for name, size in answer.peak.modules[:TOP_MODULES]]
    notes = "".join(f"<li>{escape(note)}</li>" for note in answer.notes)
    return (
        f'<table><caption style="{_STYLE}">{escape(caption)}</caption><tbody>{_rows([*totals, *parts, *peak])}</tbody></table>'
        f"<details><summary>Largest modules at the peak</summary><table><tbody>{_rows(modules)}</tbody></table></details>"
        + (f"<details><summary>Notes</summary><ul>{notes}</ul></details>" if notes else "")
    )


def _rows(rows: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f'<tr><th style="{_STYLE}">{escape(name)}</th><td style="{_STYLE}">{escape(value)}</td></tr>' for name, value in rows
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:,.2f} GiB"
