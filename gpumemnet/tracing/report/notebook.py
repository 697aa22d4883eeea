"""Compact HTML tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

_STYLE: Final = "text-align:left"

Rows = Iterable[tuple[str, str]]
"""Names and values."""


def notebook_html(
    caption: str, facts: Rows, summary: str, details: Rows, notes: Iterable[str]
) -> str:
    """Return a table of facts, and below it a table and a list that a click opens; all text is
    escaped."""
    listed = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return (
        f'<table><caption style="{_STYLE}">{escape(caption)}</caption><tbody>{_rows(facts)}</tbody></table>'
        f"<details><summary>{escape(summary)}</summary><table><tbody>{_rows(details)}</tbody></table></details>"
        + (f"<details><summary>Notes</summary><ul>{listed}</ul></details>" if listed else "")
    )


def _rows(rows: Rows) -> str:
    return "".join(
        f'<tr><th style="{_STYLE}">{escape(name)}</th><td style="{_STYLE}">{escape(value)}</td></tr>'
        for name, value in rows
    )
