"""The shared metrics of several workers: a folder with files for each, added up on request.

The files belong to the worker's number and not to its process.  So a replacement continues the
counts, and the folder does not grow.  This module imports nothing heavy, because the supervisor
uses it too.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpumemnet.errors import GpumemnetError

_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"

_number = 0


class MetricsFolderError(GpumemnetError):
    """The folder for the workers' metrics cannot be used."""


def make_metrics_folder(folder: Path | None) -> Path:
    """Create an empty folder for the metrics: ``wanted``, or a temporary one.

    Raises:
        MetricsFolderError: when it cannot be created or written to.
    """
    try:
        if folder is None:
            return Path(tempfile.mkdtemp(prefix="gpumemnet-metrics-"))
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("*.db"):  # of an earlier service
            file.unlink()
        (folder / "probe.db").touch()
        (folder / "probe.db").unlink()
    except OSError as error:
        path = folder or tempfile.gettempdir()
        raise MetricsFolderError(
            f"several workers add up their metrics in files, and {path} cannot be written to ({error.strerror}): "
            "name a folder with GPUMEMNET_METRICS_DIR"
        ) from None
    return folder


def remove_metrics_folder(folder: Path) -> None:
    """Remove the workers' files, and the folder when nothing else is in it."""
    with suppress(OSError):
        for file in folder.glob("*.db"):
            file.unlink()
        folder.rmdir()


def forget_worker(folder: Path, number: int) -> None:
    """Remove the gauges of a dead worker; its counters stay."""
    for file in folder.glob(f"gauge_live*_{number}.db"):
        with suppress(OSError):
            file.unlink()


def count_in(folder: Path, number: int) -> None:
    """Make this process count in ``folder`` as worker ``number``; call it before any metric is
    defined."""
    global _number
    _number = number
    os.environ[_VARIABLE] = str(folder)
    from prometheus_client import values

    values.ValueClass = values.MultiProcessValue(process_identifier=lambda: number)  # type: ignore[no-untyped-call]


def metrics_folder() -> Path | None:
    """The shared folder of this process; ``None`` when it counts in memory."""
    folder = os.environ.get(_VARIABLE)
    return Path(folder) if folder else None


def worker_number() -> int:
    """Number of this worker, from 0."""
    return _number
