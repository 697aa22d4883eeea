"""Whether a job fits the memory that is available: the one rule for predictions, traces and the
service.

A job fits if its safe memory is available.  It does not fit if even its expected memory is not.  In
between it may fit.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

YES: Final = "yes"
UNSURE: Final = "unsure"
NO: Final = "no"
UNKNOWN: Final = "unknown"
VERDICTS: Final = (YES, NO, UNSURE, UNKNOWN)

VERDICT_TEXTS: Final = MappingProxyType(
    {YES: "fits", UNSURE: "may not fit", NO: "does not fit", UNKNOWN: "unknown"}
)
"""Verdict → how a person reads it."""


def verdict(expected_mib: int, safe_mib: int | None, available_mib: int) -> str:
    """Compare a job's memory with the available memory.

    Args:
        expected_mib: expected memory of the job in MiB, rounded up.
        safe_mib: its upper bound in MiB, rounded up; ``None`` if there is none.
        available_mib: memory in MiB that the job can use, see
            :func:`gpumemnet.gpu.mig.available_mib`.

    Returns:
        ``yes``, ``unsure``, ``no``, or ``unknown`` without an upper bound.
    """
    if safe_mib is None:
        return UNKNOWN
    if safe_mib <= available_mib:
        return YES
    return NO if expected_mib > available_mib else UNSURE
