"""Traces a script that branches on values of the GPU both ways, because nothing computes them; the larger answer counts.

This module loads no torch, so the parent of a child process uses it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpumemnet.errors import ExtractError
from gpumemnet.tracing.report.answer import TraceAnswer
from gpumemnet.units import MIB


def larger_way(trace: Callable[[bool], TraceAnswer]) -> TraceAnswer:
    """Return the answer for a script, the larger of two where it branches on values of the GPU.

    Args:
        trace: traces the script; with ``True`` conditions are true and numbers 1, else false and 0.

    Raises:
        ExtractError: as ``trace`` does with ``False``.
    """
    answer = trace(False)
    if not answer.branches:
        return answer
    where = "; ".join(answer.branches)
    try:
        other = trace(True)
    except ExtractError as error:
        note = f"{where}: branches on values of the GPU; the other way (conditions true, numbers 1) ends without a step: {error}."
        return replace(answer, notes=(*answer.notes, note))
    smaller, larger = sorted((answer, other), key=lambda each: each.safe_bytes)
    note = (
        f"{where}: branches on values of the GPU; both ways were traced, and this is the larger one "
        f"(the other: {smaller.expected_bytes / MIB:,.0f} MiB expected)."
    )
    return replace(larger, notes=(*larger.notes, note), branches=answer.branches)
