"""Traces a script that branches on values of the GPU both ways, because nothing computes them; the
larger answer counts.

This module loads no torch, so the parent of a child process uses it too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from gpumemnet.errors import ExtractError
from gpumemnet.tracing.report.answer import TraceAnswer
from gpumemnet.units import MIB

Trace = Callable[[bool, float], TraceAnswer]
"""Traces the script: whether conditions are true and numbers 1 (else false and 0), and the share of
elements that is selected."""


def larger_way(trace: Trace) -> TraceAnswer:
    """Return the answer for a script, the larger of two where it branches on values of the GPU.

    Where it selects elements by values of the GPU, the expectation is that of half of them, and the
    bound that of all.

    Args:
        trace: traces the script.

    Raises:
        ExtractError: as ``trace`` does with conditions that are false and all elements selected.
    """
    answer, other_way = _larger_of_two(trace)
    if not answer.selections:
        return answer
    where = "; ".join(answer.selections)
    try:
        half = trace(other_way, 0.5)
    except ExtractError as error:
        note = f"{where}: selects elements by values of the GPU; all count, because half of them end without a step: {error}."
        return replace(answer, notes=(*answer.notes, note))
    note = f"{where}: selects elements by values of the GPU; half of them are expected, and the safe bytes hold all."
    return replace(
        half,
        safe_bytes=max(half.safe_bytes, answer.safe_bytes),
        batches=answer.batches,
        max_batch_size=answer.max_batch_size,
        notes=(*answer.notes, note),
        branches=answer.branches,
        selections=answer.selections,
    )


def _larger_of_two(trace: Trace) -> tuple[TraceAnswer, bool]:
    answer = trace(False, 1)
    if not answer.branches:
        return answer, False
    where = "; ".join(answer.branches)
    try:
        other = trace(True, 1)
    except ExtractError as error:
        note = f"{where}: branches on values of the GPU; the other way (conditions true, numbers 1) ends without a step: {error}."
        return replace(answer, notes=(*answer.notes, note)), False
    smaller, larger = sorted((answer, other), key=lambda each: each.safe_bytes)
    note = (
        f"{where}: branches on values of the GPU; both ways were traced, and this is the larger one "
        f"(the other: {smaller.expected_bytes / MIB:,.0f} MiB expected)."
    )
    return replace(larger, notes=(*larger.notes, note), branches=answer.branches), larger is other
