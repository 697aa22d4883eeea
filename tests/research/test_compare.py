"""``python -m research compare``: rows are rebuilt, traced and put into one table.  The rows
are made up here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dataset_builder.families import mlp
from dataset_builder.planned_job import Options, PlannedJob, training_job
from gpumemnet.gpu import device_profile
from gpumemnet.job.measurement import Measurement
from gpumemnet.tracing.training_loop import record
from gpumemnet.units import MIB
from research.traces.compare import (
    Estimates,
    TracedRow,
    all_figures,
    estimates,
    figures,
    trace_rows,
)
from research.traces.labels import subject

GPU = "NVIDIA A100-SXM4-40GB"
CONTEXT = 777 * MIB


def network(width: int) -> mlp.MlpArchitecture:
    return mlp.MlpArchitecture(
        shape="uniform",
        input_width=256,
        output_width=10,
        hidden_widths=(width, width),
        activation="relu",
        norm="batch_norm",
        dropout=0.1,
        output_activation="none",
    )


def measurement(width: int, label_bytes: int = 10**9, **options: Any) -> Measurement:
    planned = PlannedJob("mlp", network(width), Options(batch_size=64, **options))
    return Measurement(
        job=training_job(planned),
        status="ok",
        label_source="nvml_process",
        capacity_bytes=device_profile(GPU).capacity_bytes,
        provenance="measured",
        gpu=GPU,
        recipe="mlp",
        architecture=planned.architecture_json,
        options=planned.options_json,
        peak_process_bytes=label_bytes,
        peak_reserved_bytes=label_bytes - CONTEXT,
    )


def traced(rows: list[Measurement]) -> list[TracedRow]:
    outcomes = list(trace_rows(rows, 1))
    assert all(isinstance(outcome, TracedRow) for outcome in outcomes)
    return [outcome for outcome in outcomes if isinstance(outcome, TracedRow)]


@pytest.fixture(scope="module")
def rows() -> list[Measurement]:
    """Rows whose label is the traced reserved bytes and one constant."""
    drafts = [
        measurement(width, optimizer=name)
        for width in range(512, 3072, 256)
        for name in ("sgd", "adam")
    ]
    return [
        replace(
            draft,
            peak_process_bytes=row.reserved_bytes + CONTEXT,
            peak_reserved_bytes=row.reserved_bytes,
        )
        for draft, row in zip(drafts, traced(drafts), strict=True)
    ]


def test_a_row_becomes_the_job_that_was_measured(rows: list[Measurement]) -> None:
    device = device_profile(GPU)
    for row in (rows[0], measurement(512, optimizer="adamw", precision="bf16", frozen_share=0.5)):
        made = subject(row, device)
        parameters = list(made.network.parameters())
        assert sum(p.numel() for p in parameters) == row.job.total_parameters
        assert sum(p.numel() for p in parameters if p.requires_grad) == row.job.trainable_parameters
        timeline = record(made.network, made.inputs, made.options, made.platform).timeline
        weights = sum(s.size_bytes for s in timeline.storages if s.memory_class == "parameter")
        assert weights == (row.job.total_parameters or 0) * (
            2 if row.job.precision == "bf16" else 4
        )


def test_a_constant_context_is_found_from_the_other_folds(rows: list[Measurement]) -> None:
    table = {entry.estimator: entry for entry in all_figures(traced(rows), device_profile(GPU))}
    assert table["trace, context of the other folds"].median_error_mib == 0
    assert table["trace, context of the other folds"].safe_missed == 0
    assert table["trace, reserved bytes"].p95_error == 0
    assert table["trace"].median_error_mib > 100  # the catalogue does not know this made-up context
    assert table["raw FakeTensor"].under_predicted == 1
    assert table["raw FakeTensor"].safe_missed is None


def test_no_estimator_is_fitted_on_its_test_fold(rows: list[Measurement]) -> None:
    honest = traced(rows)
    fold = honest[0].fold
    spoilt = [
        replace(row, label_bytes=row.label_bytes * 100) if row.fold == fold else row
        for row in honest
    ]
    device = device_profile(GPU)
    held = np.array([row.fold == fold for row in honest])
    assert held.any()
    assert not held.all()
    for before, after in zip(estimates(honest, device), estimates(spoilt, device), strict=True):
        np.testing.assert_array_equal(before.expected_bytes[held], after.expected_bytes[held])


def test_figures_by_hand() -> None:
    labels = np.array([1000.0, 2000.0, 4000.0, 8000.0]) * MIB
    guess = Estimates("guess", labels * [1.0, 0.9, 1.04, 1.2], labels * [1.1, 0.95, 1.1, 1.3])
    found = figures("group", labels, guess, np.ones(4, dtype=bool))
    assert found.median_error == pytest.approx(0.07)
    assert found.within_5_percent == 0.5
    assert found.under_predicted == 0.25
    assert found.safe_missed == 0.25
    assert found.median_over_allocation == pytest.approx(0.1)
