"""Measures on the GPUs of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from ..recipe.planned_job import PlannedJob
from .campaign import Tally, fork_server, run_campaign
from .engine import MeterSource, Show
from .fork_server import CHILD
from .nvml import Meter, visible_meters
from .pool import Record, RunSettings


class LocalEngine:
    """The GPUs that this process may use.

    Args:
        enable_accounting: switch the driver's accounting on while the engine lasts, where that is
            allowed.
        meters: finds the GPUs.
        child: what measures; see :mod:`dataset_builder.measure.fork_server`.

    Raises:
        MeasurementError: when there is no GPU whose readings can be trusted.
    """

    def __init__(
        self,
        enable_accounting: bool = False,
        meters: MeterSource = visible_meters,
        child: str = CHILD,
    ) -> None:
        self._meters = meters()
        self._child = child
        self._accounting = enable_accounting
        self._switched_on: list[Meter] = []

    def __enter__(self) -> LocalEngine:
        if self._accounting:
            self._switched_on = [meter for meter in self._meters if meter.enable_accounting()]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for meter in self._switched_on:
            meter.disable_accounting()

    def smallest_bytes(self) -> int:
        """Memory of the smallest GPU."""
        return min(meter.gpu.total_bytes for meter in self._meters)

    def measure(
        self,
        planned: Sequence[PlannedJob],
        record: Record,
        settings: RunSettings,
        tally: Tally,
        show: Show,
    ) -> None:
        """Measure ``planned``; see :meth:`~dataset_builder.measure.engine.Engine.measure`."""
        with fork_server(settings.folder, self._child) as server:
            run_campaign(planned, record, server, self._meters, settings, tally, show)
