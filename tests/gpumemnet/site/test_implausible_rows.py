"""Rows that cannot be true are found, and true ones are left alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpumemnet.job.dataset import read_dataset
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.measurement import Measurement
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.site.implausible_rows import implausible_rows, training_state_bytes
from gpumemnet.units import GIB, MIB

PUBLISHED = Path("dataset_builder/datasets/published_mlp_a100.parquet")
TINY = {"peak_device_bytes": None, "peak_reserved_bytes": 900, "peak_allocated_bytes": 800}


def batch(measurement: Measurement, batch_size: int, **changes: object) -> Measurement:
    job = replace(measurement.job, batch_size=batch_size)
    return replace(measurement, job=job, options=f'{{"batch_size": {batch_size}}}', **changes)  # type: ignore[arg-type]


def test_a_valid_dataset_has_no_finding(measurement: Measurement, oom: Measurement) -> None:
    larger = batch(measurement, 64, peak_process_bytes=590 * MIB, peak_reserved_bytes=95 * MIB)
    failed = replace(
        oom,
        job=replace(oom.job, gradient_accumulation=1),
        status="error",
        reason="crash",
        torch=None,
        driver=None,
    )
    assert implausible_rows([measurement, batch(oom, 9_999), larger, failed]) == []


@pytest.mark.parametrize(
    ("changes", "rule", "sentence"),
    [
        ({"peak_process_bytes": 1_000} | TINY, "below-weights", "the weights take"),
        (
            {"peak_process_bytes": 1_200} | TINY,
            "below-training-state",
            "weights, gradients and optimizer state take",
        ),
        (
            {"peak_reserved_bytes": GIB},
            "reserved-above-label",
            "peak_reserved_bytes is 1,024 MiB, above the label, 600 MiB",
        ),
        (
            {
                "label_source": "nvml_device_difference",
                "peak_process_bytes": 99 * MIB,
                "peak_device_bytes": 340 * MIB,
            },
            "reserved-above-process",
            "above the process, 99 MiB",
        ),
        (
            {"peak_allocated_bytes": 500 * MIB},
            "allocated-above-reserved",
            "above reserved, 100 MiB",
        ),
        ({"capacity_bytes": 500 * MIB}, "above-capacity", "above the capacity, 500 MiB"),
        (
            {"peak_device_bytes": 900 * MIB},
            "device-far-from-process",
            "300 MiB above the process's",
        ),
        (
            {"driver": None, "protocol": None},
            "missing-provenance",
            "a measured row without driver, protocol",
        ),
        ({"context_bytes": None}, "missing-provenance", "without context_bytes"),
        (
            {"status": "oom", "reason": "full", "capacity_bytes": 0},
            "oom-without-capacity",
            "does not state how much there was",
        ),
        (
            {"status": "oom", "reason": "full", "neighbours": 3},
            "oom-with-neighbours",
            "beside other jobs",
        ),
    ],
)
def test_an_impossible_row_is_found(
    measurement: Measurement, changes: dict[str, object], rule: str, sentence: str
) -> None:
    quiet = replace(measurement, neighbours=0)
    findings = implausible_rows([replace(quiet, gpu="another"), replace(quiet, **changes)])  # type: ignore[arg-type]
    assert [(finding.row, finding.rule) for finding in findings] == [(2, rule)]
    finding = findings[0]
    assert sentence in finding.sentence
    assert str(finding) == f"row 2: {rule}: {finding.sentence}"
    assert "\n" not in str(finding)


def test_training_state_counts_what_the_optimizer_keeps(job: TrainingJob) -> None:
    plain = replace(job, optimizer="sgd", precision="bf16")
    weights, state = training_state_bytes(JobTable.from_jobs([job, plain]))
    assert weights.tolist() == [4 * 283, 2 * 283]
    assert state.tolist() == [4 * (283 + 3 * 63), 2 * (283 + 63)]  # 63 parameters are trained


def test_less_memory_for_a_larger_batch_is_found(
    measurement: Measurement, oom: Measurement
) -> None:
    larger = batch(measurement, 64, peak_process_bytes=500 * MIB, peak_device_bytes=None)
    [finding] = implausible_rows([larger, measurement])
    assert (finding.row, finding.rule) == (1, "not-monotone")
    assert finding.sentence == "batch 64 took 500 MiB, a smaller batch 600 MiB or more"
    assert implausible_rows([replace(larger, torch="2.12.0"), measurement]) == []
    full = replace(oom, neighbours=0)
    [finding] = implausible_rows([larger, full])
    assert finding.sentence == "batch 64 took 500 MiB, a smaller batch 80.0 GiB or more"


def test_published_labels_that_missed_their_peak_are_found() -> None:
    """Four of the 3,000 one-second readings lie below what every other job needed before its first
    tensor."""
    findings = implausible_rows(read_dataset(PUBLISHED))
    assert {finding.rule for finding in findings} == {"below-floor"}
    assert [finding.row for finding in findings] == [83, 178, 656, 2372]
