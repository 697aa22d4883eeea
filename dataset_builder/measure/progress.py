"""Progress of a campaign for a person: one line, rewritten on a terminal, repeated every ten
seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Final, TextIO

from gpumemnet.job.measurement import STATUSES

from .campaign import Tally

_TERMINAL_SECONDS: Final = 0.2
_LOG_SECONDS: Final = 10.0


class ProgressLine:
    """Shows a :class:`~dataset_builder.measure.campaign.Tally` on a text stream; frequent calls are
    cheap."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._last = time.monotonic()

    def __call__(self, tally: Tally) -> None:
        """Show ``tally`` if it is time to."""
        now = time.monotonic()
        if now - self._last < (_TERMINAL_SECONDS if self._terminal else _LOG_SECONDS):
            return
        self._last = now
        self._write(describe_tally(tally))

    def close(self, tally: Tally) -> None:
        """Show the last state and end the line."""
        self._write(describe_tally(tally))
        if self._terminal:
            self._stream.write("\n")

    def _write(self, line: str) -> None:
        self._stream.write(f"\r\x1b[K{line}" if self._terminal else f"{line}\n")
        self._stream.flush()


def describe_tally(tally: Tally) -> str:
    """Jobs done, their rate, the time that is left, and the share of every status."""
    done = tally.before + tally.finished
    parts = [f"{done:,} of {tally.total:,} jobs", f"{tally.running} running"]
    if tally.finished:
        parts.append(f"{tally.rate:.2f} jobs/s")
    if tally.remaining_seconds is not None:
        parts.append(f"{_minutes(tally.remaining_seconds)} left")
    if tally.finished:
        parts.append(
            " ".join(
                f"{status} {tally.statuses[status] / tally.finished:.0%}" for status in STATUSES
            )
        )
    return ", ".join(parts)


def _minutes(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}"
