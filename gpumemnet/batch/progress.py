"""Reports progress on standard error: rows, rows per second and time left, as a bar on a terminal,
else as log lines."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

_LOG_SECONDS: Final = 10.0


class Meter:
    """Counts rows and reports progress inside its ``with`` statement.

    Args:
        total: total number of rows, if known.
    """

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._rows = 0
        self._since = self._spoken = time.monotonic()
        self._skipped = 0
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("[progress.description]{task.description}"),
                BarColumn(),
                _Rows(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("jobs", total=total)

    def __enter__(self) -> Meter:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def expect(self, total: int) -> None:
        """Sets the current estimate of the total number of rows."""
        self._total = total
        if self._bar is not None:
            self._bar.update(self._task, total=total)

    def skip(self, rows: int) -> None:
        """Counts rows that an earlier run has finished; they do not count in the rate."""
        self._skipped += rows
        if self._bar is not None:
            self._bar.update(self._task, advance=rows)

    def advance(self, rows: int) -> None:
        """Counts rows that have been processed."""
        self._rows += rows
        if self._bar is not None:
            self._bar.update(self._task, advance=rows)
        elif time.monotonic() - self._spoken >= _LOG_SECONDS:
            self._spoken = time.monotonic()
            sys.stderr.write(self._line() + "\n")
            sys.stderr.flush()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._since

    @property
    def rate(self) -> float:
        """Rows per second, without those of earlier runs."""
        return self._rows / max(self.seconds, 1e-9)

    def _line(self) -> str:
        done = self._rows + self._skipped
        if not self._total:
            return f"{done:,} rows, {self.rate:,.0f} a second"
        left_seconds = max(self._total - done, 0) / max(self.rate, 1e-9)
        minutes, seconds = divmod(round(left_seconds), 60)
        return f"{done:,} of {self._total:,} rows, {self.rate:,.0f} a second, {minutes}:{seconds:02d} left"


class _Rows(ProgressColumn):
    """Progress column with finished rows, total rows and rate."""

    def render(self, task: Task) -> Text:
        total = "" if task.total is None else f" of {task.total:,.0f}"
        rate = f", {task.speed:,.0f} a second" if task.speed else ""
        return Text(f"{task.completed:,.0f}{total}{rate}")
