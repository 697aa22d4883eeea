"""Finds rows of a dataset that cannot be true, such as labels below the weights or reserved bytes above those of the process.

The schema checks columns; this module compares the numbers of one row, of rows of one network, and of rows of one GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from gpumemnet.data.measurement import DEVICE_SOURCES, Measurement, identity
from gpumemnet.physics.element_types import ELEMENT_BYTES
from gpumemnet.physics.optimizers import optimizer_copies
from gpumemnet.units import MIB, format_bytes

MONOTONE_TOLERANCE_BYTES: Final = 64 * MIB
MONOTONE_TOLERANCE: Final = 0.05
"""A larger batch may take a little less, by the larger of the two: libraries pick other kernels and workspaces."""
DEVICE_TOLERANCE_BYTES: Final = 256 * MIB
"""The driver's own share per process, which the device's reading holds and the process's does not."""
CONTEXT_TOLERANCE_BYTES: Final = 256 * MIB
FLOOR_TOLERANCE_BYTES: Final = 32 * MIB
MIN_GROUP: Final = 20
"""Rows of the same GPU and software that a typical value needs."""

_PROVENANCE: Final = ("driver", "cuda", "torch", "protocol", "seed", "seconds", "neighbours")
"""What every measured row states, whatever its outcome; ``allocator_settings`` and ``cudnn`` may be empty."""

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
    checks = (_impossible, _unexplained, _duplicates, _not_monotone, _odd_contexts, _below_floor)
    findings = [finding for check in checks for finding in check(rows)]
    return sorted(findings, key=lambda finding: (finding.row, finding.rule))


def training_state_bytes(measurement: Measurement) -> tuple[int, int]:
    """Bytes that a training process holds at least: its weights; and these with gradients and optimizer state."""
    job = measurement.job
    assert job.total_parameters is not None
    assert job.trainable_parameters is not None
    size = ELEMENT_BYTES[job.precision].weight
    copies = 1 + optimizer_copies(job.optimizer, job.optimizer_implementation).state
    weights = job.total_parameters * size
    return weights, weights + int(job.trainable_parameters * size * copies)


def _impossible(rows: Iterable[_Numbered]) -> Iterator[Finding]:
    """Contradictions between the numbers of one row."""
    for row, one in rows:
        label = one.label_bytes
        if label is None:
            continue
        weights, state = training_state_bytes(one)
        process = one.peak_process_bytes if one.label_source in DEVICE_SOURCES else None
        bounds = (
            ("below-weights", "the weights take", weights, "the label", label),
            ("below-training-state", "weights, gradients and optimizer state take", state, "the label", label),
            ("reserved-above-label", "peak_reserved_bytes is", one.peak_reserved_bytes, "the label", label),
            ("reserved-above-process", "peak_reserved_bytes is", one.peak_reserved_bytes, "peak_process_bytes", process),
            (
                "allocated-above-reserved",
                "peak_allocated_bytes is",
                one.peak_allocated_bytes,
                "reserved",
                one.peak_reserved_bytes,
            ),
            ("above-capacity", "the label is", label, "the capacity", one.capacity_bytes),
        )
        for rule, what, larger, than, limit in bounds[1:] if label >= weights else bounds[:1] + bounds[2:]:
            if larger is not None and limit is not None and larger > limit:
                yield Finding(row, rule, f"{what} {format_bytes(larger)}, above {than}, {format_bytes(limit)}")
        own, device = one.peak_process_bytes, one.peak_device_bytes
        if own is not None and device is not None and abs(own - device) > DEVICE_TOLERANCE_BYTES:
            sentence = f"the device's difference is {format_bytes(device)}, the process's reading {format_bytes(own)}"
            yield Finding(row, "device-far-from-process", sentence)


def _unexplained(rows: Iterable[_Numbered]) -> Iterator[Finding]:
    """Rows that do not say where they come from or how they ended."""
    for row, one in rows:
        if one.status != "ok" and not one.reason:
            yield Finding(row, "no-reason", f"the status is {one.status}, and no reason is given")
        if one.status == "oom" and one.capacity_bytes < MIB:
            yield Finding(row, "oom-without-capacity", "the job ran out of memory, and the row does not say out of how much")
        if one.status == "oom" and one.neighbours:
            yield Finding(row, "oom-with-neighbours", f"called out of memory beside {one.neighbours} other jobs, not alone")
        if one.provenance != "measured" or one.status not in ("ok", "oom"):
            continue
        missing = [name for name in _PROVENANCE if getattr(one, name) is None]
        if one.status == "ok":
            missing += [name for name in ("steps", "context_bytes", "peak_reserved_bytes") if getattr(one, name) is None]
            missing += [] if one.phases else ["phases"]
        if missing:
            yield Finding(row, "missing-provenance", f"a measured row without {', '.join(missing)}")


def _duplicates(rows: Iterable[_Numbered]) -> Iterator[Finding]:
    first: dict[tuple[object, ...], int] = {}
    for row, one in rows:
        earlier = first.setdefault(identity(one), row)
        if earlier != row:
            yield Finding(row, "duplicate", f"the same job on the same GPU and software as row {earlier}")


def _not_monotone(rows: Iterable[_Numbered]) -> Iterator[Finding]:
    """Rows that differ in the batch size alone, where the larger batch took clearly less, or fitted where the smaller did not."""
    groups: dict[tuple[object, ...], list[_Numbered]] = defaultdict(list)
    for row, one in rows:
        if one.status in ("ok", "oom"):
            _, architecture, _, *place = identity(one)
            groups[(replace(one.job, batch_size=1), architecture, one.label_source, *place)].append((row, one))
    for group in groups.values():
        most: tuple[int, int] | None = None
        full: tuple[int, int] | None = None
        for row, one in sorted(group, key=lambda each: (each[1].job.batch_size, each[0])):
            label = one.label_bytes
            if label is None:
                full = max(full or (0, row), (one.capacity_bytes, row))
                continue
            if most and label + max(MONOTONE_TOLERANCE_BYTES, MONOTONE_TOLERANCE * most[0]) < most[0]:
                sentence = f"batch {one.job.batch_size} took {format_bytes(label)}"
                yield Finding(row, "not-monotone", f"{sentence}, a smaller batch {format_bytes(most[0])} (row {most[1]})")
            if full and label + max(MONOTONE_TOLERANCE_BYTES, MONOTONE_TOLERANCE * full[0]) < full[0]:
                sentence = f"batch {one.job.batch_size} took {format_bytes(label)}"
                yield Finding(
                    row, "not-monotone", f"{sentence}, a smaller batch did not fit {format_bytes(full[0])} (row {full[1]})"
                )
            most = max(most or (0, row), (label, row))


def _odd_contexts(rows: Iterable[_Numbered]) -> Iterator[Finding]:
    """Context bytes far outside what nine tenths of the rows of the same family, GPU and software have."""
    for group in _alike((row, one) for row, one in rows if one.context_bytes is not None and one.label_bytes is not None):
        contexts = np.array([one.context_bytes or 0 for _, one in group])
        low, high = np.quantile(contexts, (0.05, 0.95))
        for (row, _), context in zip(group, contexts, strict=True):
            if not low - CONTEXT_TOLERANCE_BYTES <= context <= high + CONTEXT_TOLERANCE_BYTES:
                sentence = (
                    f"context_bytes are {format_bytes(context)}, those of alike rows {format_bytes(low)} to {format_bytes(high)}"
                )
                yield Finding(row, "odd-context", sentence)


def _below_floor(rows: Iterable[_Numbered]) -> Iterator[Finding]:
    """Labels without parts that leave less for the context than 95 % of similar rows: the peak was missed."""
    for group in _alike((row, one) for row, one in rows if one.context_bytes is None and one.label_bytes is not None):
        rest = np.array([(one.label_bytes or 0) - training_state_bytes(one)[1] for _, one in group])
        floor = float(np.quantile(rest, 0.05))
        for (row, _), left in zip(group, rest, strict=True):
            if 0 <= left < floor - FLOOR_TOLERANCE_BYTES:
                sentence = (
                    f"leaves {format_bytes(left)} beside weights, gradients and optimizer state, alike rows {format_bytes(floor)}"
                )
                yield Finding(row, "below-floor", f"the label {sentence} or more")


def _alike(rows: Iterable[_Numbered]) -> Iterator[list[_Numbered]]:
    """Rows of the same family, GPU, software and label source, alone or replicas, where there are enough to compare."""
    groups: dict[tuple[object, ...], list[_Numbered]] = defaultdict(list)
    for row, one in rows:
        groups[(one.job.family, one.gpu, one.driver, one.torch, one.label_source, one.job.is_replica)].append((row, one))
    return (group for group in groups.values() if len(group) >= MIN_GROUP)
