"""The interface of an engine: GPUs of this machine or of a cluster that measure planned jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..recipe.planned_job import PlannedJob
from .campaign import Tally
from .nvml import Meter
from .pool import Record, RunSettings

Show = Callable[[Tally], None]
"""Shows the progress of a campaign."""
MeterSource = Callable[[], Sequence[Meter]]
"""Finds the GPUs."""


class Engine(Protocol):
    """GPUs to measure on."""

    def smallest_bytes(self) -> int:
        """Memory of the smallest GPU."""
        ...

    def measure(
        self,
        planned: Sequence[PlannedJob],
        record: Record,
        settings: RunSettings,
        tally: Tally,
        show: Show,
    ) -> None:
        """Measure ``planned`` until all are done or the tally's budget is used up.

        Args:
            planned: the jobs that are left.
            record: takes every finished job.
            settings: how jobs are run.
            tally: is kept up to date.
            show: called a few times a second.

        Raises:
            MeasurementError: when a GPU cannot be used or is lost; what was finished has been
                recorded.
            DatasetError: when a measurement cannot be recorded.
        """
        ...
