"""Looks for rows of a dataset that cannot be true: labels below the weights, reserved above the process, and their like.

A schema says what a column may hold; this says what the numbers of one row, and of rows of the same network, imply.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpumemnet.measurement import Measurement, duplicates
from gpumemnet.physics import ELEMENT_BYTES
from gpumemnet.units import MIB, format_bytes

MONOTONE_TOLERANCE_BYTES: Final = 64 * MIB
"""A larger batch may take a little less: libraries pick other kernels and workspaces."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        row: number of the row, from 1.
        rule: short name of the rule.
        sentence: what is wrong.
    """

    row: int
    rule: str
    sentence: str


def validate(measurements: Sequence[Measurement]) -> list[Finding]:
    """Everything that is wrong in a dataset, in the order of its rows."""
    findings = [*_impossible(measurements), *_duplicates(measurements), *_not_monotone(measurements)]
    return sorted(findings, key=lambda finding: (finding.row, finding.rule))


def _impossible(measurements: Sequence[Measurement]) -> Iterator[Finding]:
    for row, one in enumerate(measurements, start=1):
        label = one.label_bytes
        if label is None:
            continue
        assert one.job.total_parameters is not None
        weights = one.job.total_parameters * ELEMENT_BYTES[one.job.precision].weight
        if label < weights:
            yield Finding(row, "below-weights", f"the label {format_bytes(label)} is below the weights' {format_bytes(weights)}")
        pairs = (
            ("reserved-above-label", "peak_reserved_bytes", one.peak_reserved_bytes, label, "the label"),
            ("allocated-above-reserved", "peak_allocated_bytes", one.peak_allocated_bytes, one.peak_reserved_bytes, "reserved"),
            ("above-capacity", "the label", label, one.capacity_bytes, "the capacity"),
        )
        for rule, what, smaller, larger, than in pairs:
            if smaller is not None and larger is not None and smaller > larger:
                yield Finding(row, rule, f"{what} {format_bytes(smaller)} is above {than} {format_bytes(larger)}")


def _duplicates(measurements: Sequence[Measurement]) -> Iterator[Finding]:
    rows = {id(one): row for row, one in enumerate(measurements, start=1)}
    for one in duplicates(measurements):
        yield Finding(rows[id(one)], "duplicate", "the same job on the same GPU and software occurs in an earlier row")


def _not_monotone(measurements: Sequence[Measurement]) -> Iterator[Finding]:
    """Rows that differ in the batch size alone, where the larger batch took clearly less."""
    groups: dict[tuple[object, ...], list[tuple[int, int, int]]] = defaultdict(list)
    for row, one in enumerate(measurements, start=1):
        if one.label_bytes is not None:
            same = (replace(one.job, batch_size=1), one.architecture, one.gpu, one.driver, one.torch, one.label_source)
            groups[same].append((one.job.batch_size, one.label_bytes, row))
    for group in groups.values():
        most = 0
        for batch, label, row in sorted(group):
            if label + MONOTONE_TOLERANCE_BYTES < most:
                sentence = f"batch {batch} took {format_bytes(label)}, a smaller batch of the same job {format_bytes(most)}"
                yield Finding(row, "not-monotone", sentence)
            most = max(most, label)
