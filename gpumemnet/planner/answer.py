"""The result of ``gpumemnet plan``, and its JSON.  This module loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One change of a job's settings, and the memory that the job takes with it.

    Attributes:
        name: its name for programs.
        change: what changes.
        expected_bytes, safe_bytes: the job's memory with it, as in :class:`~gpumemnet.tracing.report.answer.TraceAnswer`.
        verdict: whether that fits, one of :data:`~gpumemnet.gpu.verdict.VERDICTS`.
        effect: what it does to numbers and time.
        how: how to make the change, in one line.
        slowdown: share by which a step takes longer, modelled; negative if it is shorter, ``None`` if it is not modelled.
        trace_options: the options of ``gpumemnet trace`` that trace it; empty if none do.
    """

    name: str
    change: str
    expected_bytes: int
    safe_bytes: int
    verdict: str
    effect: str
    how: str
    slowdown: float | None = None
    trace_options: dict[str, Any] = field(default_factory=dict)
