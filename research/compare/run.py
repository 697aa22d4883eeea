"""Traces the rows of datasets, one process per core, and tabulates the figures of every
estimator."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import DatasetError, GpumemnetError
from gpumemnet.gpu.catalogue import DeviceProfile, device_profile
from gpumemnet.job.dataset import read_dataset
from gpumemnet.job.measurement import Measurement, measurement_from_dict, measurement_to_dict
from gpumemnet.sandbox.workers import in_processes
from research.traces.subjects import subject

from .estimates import TracedRow, estimates, traced_row
from .figures import Figures, figures, reserved_figures

_PROGRESS_SECONDS: Final = 5.0

Outcome = TracedRow | str
"""A traced row, or why it could not be traced."""


def chosen_rows(paths: Sequence[Path], count: int | None, seed: int) -> list[Measurement]:
    """The ``ok`` rows of the datasets, at most ``count`` of each family, drawn with ``seed``.

    Raises:
        DatasetError: when a file cannot be read, the rows are of several GPUs, or there is none.
    """
    rows = [row for path in paths for row in read_dataset(path) if row.label_bytes is not None]
    if not rows:
        raise DatasetError(
            f"{', '.join(map(str, paths))}: there is no row with status 'ok' to compare with"
        )
    gpus = sorted({row.gpu for row in rows})
    if len(gpus) > 1:
        raise DatasetError(
            f"the rows are of several GPUs ({', '.join(gpus)}): compare one GPU at a time"
        )
    if count is None:
        return rows
    drawn: list[Measurement] = []
    generator = np.random.default_rng(seed)
    for family in sorted({row.job.family for row in rows}):
        family_rows = [row for row in rows if row.job.family == family]
        picks = generator.permutation(len(family_rows))[:count]
        drawn += [family_rows[pick] for pick in sorted(picks)]
    return drawn


def trace_rows(rows: Sequence[Measurement], workers: int) -> Iterator[Outcome]:
    """Trace ``rows`` in ``workers`` processes; outcomes in order."""
    documents = [measurement_to_dict(row) for row in rows]
    if workers == 1:
        yield from map(_trace_document, documents)
        return
    yield from in_processes(_trace_document, [(document,) for document in documents], workers)


def _trace_document(document: dict[str, object]) -> Outcome:
    measurement = measurement_from_dict(document)
    try:
        return traced_row(subject(measurement, device_profile(measurement.gpu)), time.monotonic)
    except GpumemnetError as error:
        return str(error)


def compare(
    paths: Sequence[Path],
    count: int | None,
    seed: int,
    workers: int | None,
    out: Path | None,
    *,
    as_json: bool = False,
) -> None:
    """Print the table of every estimator against the measured rows, or its JSON; write it and the
    rows to ``out``.

    Raises:
        DatasetError: as :func:`chosen_rows`, or when no row could be traced.
    """
    rows = chosen_rows(paths, count, seed)
    device = device_profile(rows[0].gpu)
    traced: list[TracedRow] = []
    refused: list[str] = []
    shown = start = time.monotonic()
    for done, outcome in enumerate(trace_rows(rows, workers or os.cpu_count() or 1), start=1):
        if isinstance(outcome, str):
            refused.append(outcome)
        else:
            traced.append(outcome)
        if time.monotonic() - shown > _PROGRESS_SECONDS:
            shown = time.monotonic()
            left = (shown - start) / done * (len(rows) - done)
            sys.stderr.write(f"{done:,} of {len(rows):,} rows traced, {left:.0f} s left\n")
    if not traced:
        raise DatasetError(f"none of the {len(rows):,} rows could be traced: {refused[0]}")
    table = all_figures(traced, device)
    if as_json:
        sys.stdout.write(json.dumps(report_document(table, traced, refused, device)) + "\n")
    else:
        show(table, traced, refused, device, Console())
    if out is not None:
        write_report(out, table, traced, refused, device)


def all_figures(rows: Sequence[TracedRow], device: DeviceProfile) -> list[Figures]:
    """Figures of every estimator by family and by precision; lines are fitted within a family, and
    real models are a group."""
    found: list[Figures] = []
    for group in sorted({_group(row) for row in rows}):
        members = [row for row in rows if _group(row) == group]
        labels = np.array([row.label_bytes for row in members], dtype=np.float64)
        answers = estimates(members, device)
        found += [
            figures(group, labels, answer, np.ones(len(members), dtype=bool)) for answer in answers
        ]
        precisions = sorted({row.precision for row in members})
        for precision in precisions if len(precisions) > 1 else ():
            chosen = np.array([row.precision == precision for row in members])
            found += [
                figures(f"{group}, {precision}", labels, answer, chosen) for answer in answers
            ]
        reserved = reserved_figures(group, members)
        found += [reserved] if reserved else []
    return found


def _group(row: TracedRow) -> str:
    return "real models" if row.recipe == "zoo" else row.family


def show(
    table: Sequence[Figures],
    rows: Sequence[TracedRow],
    refused: Sequence[str],
    device: DeviceProfile,
    console: Console,
) -> None:
    """The table as text."""
    seconds = np.array([row.seconds for row in rows])
    for group in dict.fromkeys(entry.group for entry in table):
        entries = [entry for entry in table if entry.group == group]
        text_table = Table(
            title=f"{group}: {entries[0].rows:,} measured rows on {device.name}",
            title_justify="left",
        )
        for heading in _HEADINGS:
            text_table.add_column(heading, justify="left" if heading == "estimator" else "right")
        for entry in entries:
            text_table.add_row(*_cells(entry))
        console.print(text_table)
    console.print(f"one trace: median {np.median(seconds):.2f} s, slowest {seconds.max():.2f} s")
    if refused:
        console.print(
            f"{len(refused):,} rows could not be traced; the first: {refused[0]}", soft_wrap=True
        )


_HEADINGS: Final = (
    *(
        "estimator",
        "median error",
        "p95",
        "MiB",
        "within 5 %",
        "too low",
        "above safe",
        "over-allocation",
        "1 GiB",
        "8,000 MiB",
    ),
)


def _cells(entry: Figures) -> tuple[str, ...]:
    return (
        entry.estimator,
        f"{entry.median_error:.2%}",
        f"{entry.p95_error:.2%}",
        f"{entry.median_error_mib:,.1f}",
        f"{entry.within_5_percent:.1%}",
        f"{entry.under_predicted:.1%}",
        "-" if entry.safe_missed is None else f"{entry.safe_missed:.2%}",
        "-" if entry.median_over_allocation is None else f"{entry.median_over_allocation:.1%}",
        f"{entry.accuracy_1_gib:.3f}",
        f"{entry.accuracy_8000_mib:.3f}",
    )


def report_document(
    table: Sequence[Figures],
    rows: Sequence[TracedRow],
    refused: Sequence[str],
    device: DeviceProfile,
) -> dict[str, Any]:
    """The table and the traced rows as a JSON object."""
    return {
        "gpu": device.name,
        "figures": [asdict(entry) for entry in table],
        "rows": [asdict(row) for row in rows],
        "refused": list(refused),
    }


def write_report(
    folder: Path,
    table: Sequence[Figures],
    rows: Sequence[TracedRow],
    refused: Sequence[str],
    device: DeviceProfile,
) -> None:
    """``comparison.json``, ``comparison.md`` and the traced rows under ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(
        folder / "comparison.json",
        json.dumps(report_document(table, rows, refused, device), indent=1).encode(),
    )
    lines = [f"# Trace against measurement, {device.name}", ""]
    for group in dict.fromkeys(entry.group for entry in table):
        entries = [entry for entry in table if entry.group == group]
        lines += [f"## {group}, {entries[0].rows:,} rows", "", "| " + " | ".join(_HEADINGS) + " |"]
        lines += ["|" + "---|" * len(_HEADINGS)]
        lines += ["| " + " | ".join(_cells(entry)) + " |" for entry in entries]
        lines.append("")
    replace_file(folder / "comparison.md", "\n".join(lines).encode())
