"""Adds the traced peak to the jobs of a dataset: the reserved bytes that the trace finds, a feature
for models to learn from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gpumemnet.errors import GpumemnetError
from gpumemnet.gpu.catalogue import device_profile
from gpumemnet.job.dataset import read_dataset, write_dataset
from gpumemnet.job.measurement import measurement_from_dict, measurement_to_dict
from gpumemnet.sandbox.workers import in_processes

from .subjects import Subject, subject, traced_run


def add_traces(dataset: Path, out: Path, workers: int | None) -> tuple[int, int]:
    """Write ``dataset`` to ``out`` with each job's traced peak; returns how many rows have one, and
    how many could not be traced.

    Raises:
        DatasetError: when the dataset cannot be read or ``out`` cannot be written.
    """
    rows = read_dataset(dataset)
    tasks = [(measurement_to_dict(row),) for row in rows]
    peaks = list(in_processes(_trace_row, tasks, workers))
    traced = [
        row if peak is None else replace(row, job=replace(row.job, traced_peak_bytes=peak))
        for row, peak in zip(rows, peaks, strict=True)
    ]
    write_dataset(out, traced)
    return sum(peak is not None for peak in peaks), sum(peak is None for peak in peaks)


def _trace_row(document: dict[str, Any]) -> int | None:
    measurement = measurement_from_dict(document)
    try:
        one: Subject = subject(measurement, device_profile(measurement.gpu))
        return traced_run(one.network, one.inputs, one.options, one.platform).reserved_bytes
    except GpumemnetError:
        return None
