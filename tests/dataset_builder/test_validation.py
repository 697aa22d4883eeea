"""Rows that cannot be true are found, and true ones are left alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dataset_builder.validation import validate
from gpumemnet.measurement import Measurement
from gpumemnet.units import GIB, MIB


def test_a_sound_dataset_has_no_finding(measurement: Measurement, oom: Measurement) -> None:
    larger = replace(
        measurement, job=replace(measurement.job, batch_size=64), peak_process_bytes=590 * MIB, peak_reserved_bytes=95 * MIB
    )
    assert validate([measurement, replace(oom, job=replace(oom.job, batch_size=9_999)), larger]) == []


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"peak_process_bytes": 1_000, "peak_reserved_bytes": None}, "below-weights"),
        ({"peak_reserved_bytes": GIB}, "reserved-above-label"),
        ({"peak_allocated_bytes": 500 * MIB}, "allocated-above-reserved"),
        ({"capacity_bytes": 500 * MIB}, "above-capacity"),
    ],
)
def test_an_impossible_row_is_found(measurement: Measurement, changes: dict[str, int | None], rule: str) -> None:
    other = replace(measurement, gpu="another")
    [finding] = validate([other, replace(measurement, **changes)])  # type: ignore[arg-type]
    assert (finding.row, finding.rule) == (2, rule)
    assert "\n" not in finding.sentence


def test_a_repeated_row_is_found(measurement: Measurement) -> None:
    findings = validate([measurement, replace(measurement, gpu="another"), measurement])
    assert [(finding.row, finding.rule) for finding in findings] == [(3, "duplicate")]


def test_less_memory_for_a_larger_batch_is_found(measurement: Measurement) -> None:
    larger = replace(measurement, job=replace(measurement.job, batch_size=64), peak_process_bytes=500 * MIB)
    [finding] = validate([larger, measurement])
    assert (finding.row, finding.rule) == (1, "not-monotone")
    other_stack = replace(larger, torch="2.12.0")
    assert validate([other_stack, measurement]) == []
