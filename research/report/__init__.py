"""The report of an evaluation: tables in Markdown, all figures in JSON, and pictures, drawn from
sections alone.

It trains nothing and loads no model; it needs :class:`research.report.figures.Section` objects
only.
"""

from .document import write_report

__all__ = ["write_report"]
