"""Memory units.  Inside the project every amount is an ``int`` of bytes; MiB and GiB exist at the
edges only."""

from __future__ import annotations

MIB = 2**20
GIB = 2**30


def ceil_mib(amount_bytes: float) -> int:
    """Whole MiB that hold ``amount_bytes``: the number a scheduler can reserve without cutting the
    job short."""
    return -int(-amount_bytes // MIB)


def format_bytes(amount_bytes: float) -> str:
    """``amount_bytes`` for a person: bytes below 1 MiB, MiB below 10 GiB (as ``nvidia-smi`` shows),
    GiB above."""
    if abs(amount_bytes) < MIB:
        return f"{amount_bytes:,.0f} bytes"
    if abs(amount_bytes) < 10 * GIB:
        return f"{amount_bytes / MIB:,.0f} MiB"
    return f"{amount_bytes / GIB:,.1f} GiB"
