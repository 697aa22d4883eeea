"""Measurements, for the tests of the dataset builder."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumemnet.job.layers import Layer
from gpumemnet.job.measurement import Measurement, Phase
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.units import GIB, MIB


@pytest.fixture
def job() -> TrainingJob:
    return TrainingJob(
        family="mlp",
        batch_size=32,
        input_elements=10,
        optimizer="adamw",
        precision="amp_bf16",
        layers=(Layer("linear", 20, 220), Layer("relu", 20), Layer("linear", 3, 63)),
        trainable_parameters=63,
        activation_function="relu",
        checkpointing="every_block",
        gradient_accumulation=2,
    )


@pytest.fixture
def measurement(job: TrainingJob) -> Measurement:
    return Measurement(
        job=job,
        status="ok",
        label_source="nvml_process",
        capacity_bytes=80 * GIB,
        provenance="measured",
        gpu="NVIDIA Example",
        recipe="mlp",
        architecture='{"shape": "uniform"}',
        options='{"frozen_share": 0.5}',
        peak_process_bytes=600 * MIB,
        peak_device_bytes=601 * MIB,
        peak_reserved_bytes=100 * MIB,
        peak_allocated_bytes=90 * MIB,
        context_bytes=500 * MIB,
        phases=(Phase("context", 0, 0, 0, 0, 400 * MIB, 500 * MIB), Phase("build", 1, 2, 3, 4)),
        allocator={"segments": 3, "alloc_retries": 0},
        steps=3,
        seconds=1.25,
        seed=7,
        neighbours=2,
        protocol="step-1",
        driver="580.1",
        cuda="12.8",
        cudnn="91002",
        torch="2.11.0",
        allocator_settings="",
    )


@pytest.fixture
def oom(measurement: Measurement) -> Measurement:
    return replace(
        measurement,
        status="oom",
        reason="out of memory",
        peak_process_bytes=None,
        peak_device_bytes=None,
        context_bytes=None,
        neighbours=0,
    )
