"""Finds rows of a dataset that cannot be true, such as labels below the weights or reserved bytes
above those of the process.

The schema checks columns; this module compares the numbers of one row, of rows of one network, and
of rows of one GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from gpumemnet.job.measurement import DEVICE_SOURCES, Measurement, identity
from gpumemnet.physics.element_types import ELEMENT_BYTES
from gpumemnet.physics.optimizers import optimizer_copies
from gpumemnet.units import MIB, format_bytes

MONOTONE_TOLERANCE_BYTES: Final = 64 * MIB
MONOTONE_TOLERANCE: Final = 0.05
"""A larger batch may take less by the larger of the two, because libraries choose other kernels and
workspaces."""
DEVICE_TOLERANCE_BYTES: Final = 256 * MIB
"""The driver's own share per process, which the device's reading holds and the process's does
not."""
CONTEXT_TOLERANCE_BYTES: Final = 256 * MIB
FLOOR_TOLERANCE_BYTES: Final = 32 * MIB
MIN_GROUP: Final = 20
"""Rows of the same GPU and software that a typical value needs."""

_PROVENANCE: Final = ("driver", "cuda", "torch", "protocol", "seed", "seconds", "neighbours")
"""Fields that every measured row needs, whatever its outcome; ``allocator_settings`` and ``cudnn``
may be empty."""

_Numbered = tuple[int, Measurement]


@dataclass(frozen=True, slots=True)
class Finding:
    """One implausible row.

    Attributes:
        row: number of the row, from 1.
        rule: short name of the rule.
        sentence: what is wrong; names the other row where there is one.
    """

    row: int
    rule: str
    sentence: str

    def __str__(self) -> str:
        return f"row {self.row}: {self.rule}: {self.sentence}"


def validate(measurements: Sequence[Measurement]) -> list[Finding]:
    """The findings of a dataset, in the order of its rows."""
    rows = list(enumerate(measurements, start=1))
    checks = (
        _contradictions,
        _incomplete,
        _duplicates,
        _not_monotone,
        _unusual_contexts,
        _below_floor,
    )
    findings = [finding for check in checks for finding in check(rows)]
    return sorted(findings, key=lambda finding: (finding.row, finding.rule))


def training_state_bytes(measurement: Measurement) -> tuple[int, int]:
    """Bytes that a training process holds at least: its weights; and these with gradients and
    optimizer state."""
    job = measurement.job
    assert job.total_parameters is not None
    assert job.trainable_parameters is not None
    size = ELEMENT_BYTES[job.precision].weight
    copies = 1 + optimizer_copies(job.optimizer, job.optimizer_implementation).state
    weights = job.total_parameters * size
    return weights, weights + int(job.trainable_parameters * size * copies)


def _contradictions(rows: Iterable[_Numbered]) -> Iterator[Finding]:
    """Contradictions between the numbers of one row."""
    for row, measurement in rows:
        label = measurement.label_bytes
        if label is None:
            continue
        weights, state = training_state_bytes(measurement)
        process = (
            measurement.peak_process_bytes if measurement.label_source in DEVICE_SOURCES else None
        )
        bounds = (
            ("below-weights", "the weights take", weights, "the label", label),
            (
                "below-training-state",
                "weights, gradients and optimizer state take",
                state,
                "the label",
                label,
            ),
            (
                "reserved-above-label",
                "peak_reserved_bytes is",
                measurement.peak_reserved_bytes,
                "the label",
                label,
            ),
            (
                "reserved-above-process",
                "peak_reserved_bytes is",
                measurement.peak_reserved_bytes,
                "peak_process_bytes",
                process,
            ),
            (
                "allocated-above-reserved",
                "peak_allocated_bytes is",
                measurement.peak_allocated_bytes,
                "reserved",
                measurement.peak_reserved_bytes,
            ),
            ("above-capacity", "the label is", label, "the capacity", measurement.capacity_bytes),
        )
        for rule, amount_name, amount, limit_name, limit in (
            bounds[1:] if label >= weights else bounds[:1] + bounds[2:]
        ):
            if amount is not None and limit is not None and amount > limit:
                yield Finding(
                    row,
                    rule,
                    f"{amount_name} {format_bytes(amount)}, above {limit_name}, {format_bytes(limit)}",
                )
        process_bytes, device_bytes = measurement.peak_process_bytes, measurement.peak_device_bytes
        if (
            process_bytes is not None
            and device_bytes is not None
            and abs(process_bytes - device_bytes) > DEVICE_TOLERANCE_BYTES
        ):
            sentence = f"the device's difference is {format_bytes(device_bytes)}, the process's reading {format_bytes(process_bytes)}"
            yield Finding(row, "device-far-from-process", sentence)


def _incomplete(rows: Iterable[_Numbered]) -> Iterator[Finding]:
    """Rows without a reason for their status, or without their provenance."""
    for row, measurement in rows:
        if measurement.status != "ok" and not measurement.reason:
            yield Finding(
                row, "no-reason", f"the status is {measurement.status}, and no reason is given"
            )
        if measurement.status == "oom" and measurement.capacity_bytes < MIB:
            yield Finding(
                row,
                "oom-without-capacity",
                "the job ran out of memory, and the row does not state how much there was",
            )
        if measurement.status == "oom" and measurement.neighbours:
            yield Finding(
                row,
                "oom-with-neighbours",
                f"ran out of memory beside {measurement.neighbours} other jobs, not alone",
            )
        if measurement.provenance != "measured" or measurement.status not in ("ok", "oom"):
            continue
        missing = [name for name in _PROVENANCE if getattr(measurement, name) is None]
        if measurement.status == "ok":
            missing += [
                name
                for name in ("steps", "context_bytes", "peak_reserved_bytes")
                if getattr(measurement, name) is None
            ]
            missing += [] if measurement.phases else ["phases"]
        if missing:
            yield Finding(row, "missing-provenance", f"a measured row without {', '.join(missing)}")


def _duplicates(rows: Iterable[_Numbered]) -> Iterator[Finding]:
    first: dict[tuple[object, ...], int] = {}
    for row, measurement in rows:
        earlier = first.setdefault(identity(measurement), row)
        if earlier != row:
            yield Finding(
                row, "duplicate", f"the same job on the same GPU and software as row {earlier}"
            )


def _not_monotone(rows: Iterable[_Numbered]) -> Iterator[Finding]:
    """Rows that differ in the batch size alone, where the larger batch took clearly less, or fitted
    where the smaller did not."""
    groups: dict[tuple[object, ...], list[_Numbered]] = defaultdict(list)
    for row, measurement in rows:
        if measurement.status in ("ok", "oom"):
            _, architecture, _, *place = identity(measurement)
            reading = measurement.label_source, measurement.label_state
            groups[(replace(measurement.job, batch_size=1), architecture, *reading, *place)].append(
                (row, measurement)
            )
    for group in groups.values():
        most: tuple[int, int] | None = None
        full: tuple[int, int] | None = None
        for row, measurement in sorted(group, key=lambda each: (each[1].job.batch_size, each[0])):
            label = measurement.label_bytes
            if label is None:
                full = max(full or (0, row), (measurement.capacity_bytes, row))
                continue
            if (
                most
                and label + max(MONOTONE_TOLERANCE_BYTES, MONOTONE_TOLERANCE * most[0]) < most[0]
            ):
                sentence = f"batch {measurement.job.batch_size} took {format_bytes(label)}"
                yield Finding(
                    row,
                    "not-monotone",
                    f"{sentence}, a smaller batch {format_bytes(most[0])} (row {most[1]})",
                )
            if (
                full
                and label + max(MONOTONE_TOLERANCE_BYTES, MONOTONE_TOLERANCE * full[0]) < full[0]
            ):
                sentence = f"batch {measurement.job.batch_size} took {format_bytes(label)}"
                yield Finding(
                    row,
                    "not-monotone",
                    f"{sentence}, a smaller batch did not fit {format_bytes(full[0])} (row {full[1]})",
                )
            most = max(most or (0, row), (label, row))


def _unusual_contexts(rows: Iterable[_Numbered]) -> Iterator[Finding]:
    """Context bytes far outside what nine tenths of the rows of the same family, GPU and software
    have."""
    for group in _comparable_groups(
        (row, measurement)
        for row, measurement in rows
        if measurement.context_bytes is not None and measurement.label_bytes is not None
    ):
        contexts = np.array([measurement.context_bytes or 0 for _, measurement in group])
        low, high = np.quantile(contexts, (0.05, 0.95))
        for (row, _), context in zip(group, contexts, strict=True):
            if not low - CONTEXT_TOLERANCE_BYTES <= context <= high + CONTEXT_TOLERANCE_BYTES:
                usual = f"{format_bytes(low)} to {format_bytes(high)}"
                yield Finding(
                    row,
                    "unusual-context",
                    f"context_bytes are {format_bytes(context)}, those of similar rows {usual}",
                )


def _below_floor(rows: Iterable[_Numbered]) -> Iterator[Finding]:
    """Labels, without their parts, that leave less for the context than 95 % of similar rows: the
    reading missed the peak.

    Real models are left out: they are networks of all sizes, so that a small one says nothing of a
    large one.
    """
    made = (
        (row, each)
        for row, each in rows
        if each.context_bytes is None and each.architecture_family is None
    )
    for group in _comparable_groups(
        (row, each) for row, each in made if each.label_bytes is not None
    ):
        rest = np.array(
            [
                (measurement.label_bytes or 0) - training_state_bytes(measurement)[1]
                for _, measurement in group
            ]
        )
        floor = float(np.quantile(rest, 0.05))
        for (row, _), remaining in zip(group, rest, strict=True):
            if 0 <= remaining < floor - FLOOR_TOLERANCE_BYTES:
                sentence = f"the label leaves {format_bytes(remaining)} beside weights, gradients and optimizer state"
                yield Finding(
                    row, "below-floor", f"{sentence}, similar rows {format_bytes(floor)} or more"
                )


def _comparable_groups(rows: Iterable[_Numbered]) -> Iterator[list[_Numbered]]:
    """Rows of the same family, GPU, software and label source, alone or replicas, where there are
    enough to compare."""
    groups: dict[tuple[object, ...], list[_Numbered]] = defaultdict(list)
    for row, measurement in rows:
        groups[
            (
                measurement.job.family,
                measurement.gpu,
                measurement.driver,
                measurement.torch,
                measurement.label_source,
                measurement.job.is_replica,
            )
        ].append((row, measurement))
    return (group for group in groups.values() if len(group) >= MIN_GROUP)
