"""Engines: where a campaign's jobs run.  The local engine uses the GPUs of this machine; Ray's those of a whole cluster.

An engine knows the memory of its GPUs and measures planned jobs; what becomes of the results is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from types import TracebackType
from typing import Protocol

from ..recipe.planned_job import PlannedJob
from .campaign import Tally, fork_server, run_campaign
from .fork_server import CHILD
from .nvml import Meter, visible_meters
from .pool import Record, RunSettings

Show = Callable[[Tally], None]
MeterSource = Callable[[], Sequence[Meter]]


class EngineName(StrEnum):
    """The engines, by the word that the command line knows them by."""

    LOCAL = "local"
    RAY = "ray"


class Engine(Protocol):
    """GPUs to measure on."""

    def smallest_bytes(self) -> int:
        """Memory of the smallest GPU."""
        ...

    def measure(self, planned: Sequence[PlannedJob], record: Record, settings: RunSettings, tally: Tally, show: Show) -> None:
        """Measure ``planned`` until all are done or the tally's budget is used up.

        Args:
            planned: the jobs that are left.
            record: takes every finished job.
            settings: how jobs are run.
            tally: is kept up to date.
            show: called a few times a second.

        Raises:
            MeasurementError: when a GPU cannot be used or is lost; what was finished has been recorded.
            DatasetError: when a measurement cannot be recorded.
        """
        ...


class LocalEngine:
    """The GPUs that this process may use.

    Args:
        enable_accounting: switch the driver's accounting on while the engine lasts, where that is allowed.
        meters: finds the GPUs.
        child: what measures; see :mod:`dataset_builder.measure.fork_server`.

    Raises:
        MeasurementError: when there is no GPU whose readings can be trusted.
    """

    def __init__(self, enable_accounting: bool = False, meters: MeterSource = visible_meters, child: str = CHILD) -> None:
        self._meters = meters()
        self._child = child
        self._accounting = enable_accounting
        self._switched_on: list[Meter] = []

    def __enter__(self) -> LocalEngine:
        if self._accounting:
            self._switched_on = [meter for meter in self._meters if meter.enable_accounting()]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for meter in self._switched_on:
            meter.disable_accounting()

    def smallest_bytes(self) -> int:
        """Memory of the smallest GPU."""
        return min(meter.gpu.total_bytes for meter in self._meters)

    def measure(self, planned: Sequence[PlannedJob], record: Record, settings: RunSettings, tally: Tally, show: Show) -> None:
        """Measure ``planned``; see :meth:`Engine.measure`."""
        with fork_server(settings.folder, self._child) as server:
            run_campaign(planned, record, server, self._meters, settings, tally, show)


def open_engine(name: EngineName, enable_accounting: bool) -> AbstractContextManager[Engine]:
    """The engine called ``name``, holding its GPUs.

    Raises:
        MissingExtraError: when it needs a package that is not installed.
        MeasurementError: when it has no GPU whose readings can be trusted.
    """
    if name is EngineName.LOCAL:
        return LocalEngine(enable_accounting)
    from .ray_engine import RayEngine

    return RayEngine(enable_accounting)
