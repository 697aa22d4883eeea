"""Traces measured jobs, and compares the traces with the readings and with FakeTensor alone."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import DatasetError, GpumemnetError
from gpumemnet.gpu import DeviceProfile, context, device_profile
from gpumemnet.job.dataset import read_dataset
from gpumemnet.job.measurement import Measurement, measurement_from_dict, measurement_to_dict
from gpumemnet.physics.element_types import ELEMENT_BYTES
from gpumemnet.sandbox.process import in_processes
from gpumemnet.tracing.timeline import peak_of, steady_memory
from gpumemnet.tracing.training_loop import record
from gpumemnet.units import GIB, MIB
from research.traces.labels import Subject, subject

FOLDS: Final = 5
COVERAGE: Final = 0.99

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRow:
    """One measured row and its traces, in bytes.

    Attributes:
        family, architecture_key, precision, optimizer, recipe: of the row.
        label_bytes: measured process bytes.
        measured_reserved_bytes: measured reserved bytes, where the row has them.
        reserved_bytes: of the trace, with expected scratch memory.
        bound_bytes: safe bytes of the trace, context included.
        fake_tensor_bytes: allocated peak without corrections.
        parameter_bytes, activation_bytes: the two numbers of calibrated physics.
        seconds: of the trace.
    """

    family: str
    architecture_key: str
    precision: str
    optimizer: str
    recipe: str
    label_bytes: int
    measured_reserved_bytes: int | None
    reserved_bytes: int
    bound_bytes: int
    fake_tensor_bytes: int
    parameter_bytes: int
    activation_bytes: int
    seconds: float

    @property
    def fold(self) -> int:
        """Fold of the row's architecture."""
        return int(hashlib.sha256(self.architecture_key.encode()).hexdigest(), 16) % FOLDS


@dataclass(frozen=True, slots=True, eq=False)
class Estimates:
    """One estimator's answers, shape ``[B]`` each.

    Attributes:
        name: name of the estimator.
        expected_bytes: the expected memory.
        safe_bytes: the bound; NaN where the estimator gives none.
    """

    name: str
    expected_bytes: Array
    safe_bytes: Array


def traced_row(subject: Subject, clock: Callable[[], float]) -> TracedRow:
    """Trace ``subject`` with and without corrections.

    Raises:
        ExtractError: when it cannot be traced.
    """
    start = clock()
    recording = record(subject.network, subject.inputs, subject.options, subject.platform)
    timeline, device = recording.timeline, subject.platform.device
    memory = steady_memory(timeline, device)
    seconds = clock() - start
    plain_options = replace(
        subject.options,
        optimizer_implementation="for_loop",
        precision=_without_autocast(subject.options.precision),
        last_batch_size=None,
        forward_passes_first=0,
    )
    uncorrected = record(
        subject.network, subject.inputs, plain_options, subject.platform, corrected=False
    ).timeline
    tensors = [
        0 if storage.memory_class == "workspace" else storage.size_bytes
        for storage in uncorrected.storages
    ]
    measurement, job = subject.measurement, subject.measurement.job
    assert measurement.label_bytes is not None
    element = ELEMENT_BYTES[job.precision]
    return TracedRow(
        family=job.family,
        architecture_key=measurement.architecture_key,
        precision=job.precision,
        optimizer=job.optimizer,
        recipe=measurement.recipe,
        label_bytes=measurement.label_bytes,
        measured_reserved_bytes=measurement.peak_reserved_bytes,
        reserved_bytes=memory.replayed.reserved_bytes,
        bound_bytes=memory.safe_bytes,
        fake_tensor_bytes=peak_of(uncorrected, tensors)[0],
        parameter_bytes=(job.total_parameters or 0) * element.weight,
        activation_bytes=(job.total_activations or 0) * job.batch_size * element.activation,
        seconds=seconds,
    )


def estimates(rows: Sequence[TracedRow], device: DeviceProfile) -> list[Estimates]:
    """Every estimator on ``rows`` of one family and one GPU; what is fitted is fitted on the other
    folds."""
    columns = {
        name: np.array([getattr(row, name) for row in rows], dtype=np.float64) for name in _COLUMNS
    }
    folds = np.array([row.fold for row in rows])
    labels, ones = columns["label_bytes"], np.ones(len(rows))
    gpu_context = context(device)
    reserved = columns["reserved_bytes"]
    return [
        _fitted(
            "median of the other folds",
            labels,
            folds,
            lambda train: np.full(len(rows), np.median(labels[train])),
        ),
        _line(
            "calibrated physics: line in two numbers",
            labels,
            folds,
            [columns["parameter_bytes"], columns["activation_bytes"], ones],
        ),
        Estimates("raw FakeTensor", columns["fake_tensor_bytes"], np.full(len(rows), np.nan)),
        _line("FakeTensor, affine", labels, folds, [columns["fake_tensor_bytes"], ones]),
        Estimates("trace", reserved + gpu_context.expected_bytes, columns["bound_bytes"]),
        _fitted(
            "trace, context of the other folds",
            labels,
            folds,
            lambda train: reserved + np.median((labels - reserved)[train]),
        ),
    ]


_COLUMNS: Final = (
    *(
        "label_bytes",
        "reserved_bytes",
        "bound_bytes",
        "fake_tensor_bytes",
        "parameter_bytes",
        "activation_bytes",
    ),
)


def _line(name: str, labels: Array, folds: NDArray[np.int64], terms: list[Array]) -> Estimates:
    inputs = np.stack(terms, axis=1)

    def predict(train: NDArray[np.bool_]) -> Array:
        slopes, *_ = np.linalg.lstsq(inputs[train], labels[train], rcond=None)
        line: Array = inputs @ slopes
        return line

    return _fitted(name, labels, folds, predict)


def _fitted(
    name: str,
    labels: Array,
    folds: NDArray[np.int64],
    predict: Callable[[NDArray[np.bool_]], Array],
) -> Estimates:
    """Answers for each fold from a fit on the others, with the ratio that covers 99 % of those
    others as the bound."""
    expected, safe = np.empty(len(labels)), np.empty(len(labels))
    for fold in range(FOLDS):
        train, held_out = folds != fold, folds == fold
        if not train.any() or not held_out.any():
            train = np.ones(len(labels), dtype=bool) if not train.any() else train
        answers = predict(train)
        expected[held_out] = answers[held_out]
        ratios = np.sort(labels[train] / np.maximum(answers[train], 1.0))
        rank = min(len(ratios) - 1, int(np.ceil(COVERAGE * (len(ratios) + 1))) - 1)
        safe[held_out] = answers[held_out] * ratios[rank]
    return Estimates(name, expected, safe)


def _without_autocast(precision: str) -> str:
    return "bf16" if precision == "bf16" else "fp32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Errors of one estimator on one group of rows; shares are of rows, errors relative to the
    label.

    Attributes:
        estimator, group, rows: the estimator, the group and its number of rows.
        median_error, p95_error: absolute error.
        median_error_mib: in MiB.
        within_5_percent: share within 5 %.
        under_predicted: share whose expected bytes lie below the label by more than 1 %.
        safe_missed: share above their safe bytes; ``None`` where there are none.
        median_over_allocation: safe over label, minus one.
        accuracy_1_gib, accuracy_8000_mib: share whose expected bytes lie in the label's bin.
    """

    estimator: str
    group: str
    rows: int
    median_error: float
    p95_error: float
    median_error_mib: float
    within_5_percent: float
    under_predicted: float
    safe_missed: float | None
    median_over_allocation: float | None
    accuracy_1_gib: float
    accuracy_8000_mib: float


UNDER_PREDICTED_BY = 0.01
"""Expected bytes that are lower than the label by more than this share count as under-predicted."""


def figures(group: str, labels: Array, estimator: Estimates, chosen: NDArray[np.bool_]) -> Figures:
    """Figures of ``estimator`` on the rows ``chosen`` (boolean, shape ``[B]``)."""
    label, expected, safe = (
        labels[chosen],
        estimator.expected_bytes[chosen],
        estimator.safe_bytes[chosen],
    )
    errors = np.abs(expected - label)
    bounded = not np.isnan(safe).any()
    return Figures(
        estimator=estimator.name,
        group=group,
        rows=len(label),
        median_error=float(np.median(errors / label)),
        p95_error=float(np.percentile(errors / label, 95)),
        median_error_mib=float(np.median(errors) / MIB),
        within_5_percent=float((errors <= 0.05 * label).mean()),
        under_predicted=float((expected < (1 - UNDER_PREDICTED_BY) * label).mean()),
        safe_missed=float((label > safe).mean()) if bounded else None,
        median_over_allocation=float(np.median(safe / label) - 1) if bounded else None,
        accuracy_1_gib=float((expected // GIB == label // GIB).mean()),
        accuracy_8000_mib=float((expected // (8000 * MIB) == label // (8000 * MIB)).mean()),
    )


def reserved_figures(group: str, rows: Sequence[TracedRow]) -> Figures | None:
    """Figures of the trace's reserved bytes against the measured ones, of the rows that have
    them."""
    known = [row for row in rows if row.measured_reserved_bytes is not None]
    if not known:
        return None
    labels = np.array([row.measured_reserved_bytes for row in known], dtype=np.float64)
    traced = np.array([row.reserved_bytes for row in known], dtype=np.float64)
    every = np.ones(len(known), dtype=bool)
    return figures(
        group,
        labels,
        Estimates("trace, reserved bytes", traced, np.full(len(known), np.nan)),
        every,
    )


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
