"""The report of an evaluation: tables in Markdown, all figures in JSON, and pictures, drawn from sections alone.

It trains nothing and loads no model: whoever has :class:`models.evaluation.section.Section` objects can have them written down.
"""

from .document import write_report

__all__ = ["write_report"]
