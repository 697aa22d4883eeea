"""Labels jobs by tracing them, without a GPU: rows made traceable, recipes, traced peaks."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from dataset_builder.families import TensorSpec, family, loss, parse_architecture
from dataset_builder.measure.campaign import Tally
from dataset_builder.measure.journal import Journal, Settings
from dataset_builder.measure.training import apply_options
from dataset_builder.planned_job import (
    Options,
    PlannedJob,
    parse_planned,
    training_job,
)
from dataset_builder.recipe import Recipe, sample_jobs
from gpumemnet.cli.output import progress_bar
from gpumemnet.errors import GpumemnetError
from gpumemnet.extract.module_calls import ModelInputs
from gpumemnet.gpu import DeviceProfile, context, device_profile
from gpumemnet.job.dataset import read_dataset, write_dataset
from gpumemnet.job.measurement import (
    TRACED,
    Measurement,
    measurement_from_dict,
    measurement_to_dict,
)
from gpumemnet.sandbox.process import in_processes
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.losses_and_optimizers import TargetLoss
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.tracing.timeline import STEADY_STEPS, Replayed, steady_memory
from gpumemnet.tracing.training_loop import record
from research.published_tables.importing import Rebuilds, published_family
from research.published_tables.rows import PUBLISHED_OPTIONS


@dataclass(frozen=True, slots=True, eq=False)
class Subject:
    """One row, ready to be traced.

    Attributes:
        measurement: the row.
        network: on meta tensors, its options applied.
        inputs: its batch.
        options: how it is trained.
        platform: what it ran on.
    """

    measurement: Measurement
    network: nn.Module
    inputs: ModelInputs
    options: TraceOptions
    platform: Platform


def subject(measurement: Measurement, device: DeviceProfile) -> Subject:
    """``measurement`` made traceable.

    Raises:
        DatasetError: when its network cannot be rebuilt.
    """
    return (
        _published(measurement, device)
        if measurement.provenance == "published"
        else _measured(measurement, device)
    )


def _measured(measurement: Measurement, device: DeviceProfile) -> Subject:
    """Subject of a row that the builder measured or traced."""
    document = json.loads(measurement.architecture)
    name = measurement.job.family
    planned = PlannedJob(
        name, parse_architecture(name, document), Options(**json.loads(measurement.options))
    )
    return Subject(measurement, *traceable(planned, measurement.job.attention_kernel, device))


def traceable(
    planned: PlannedJob, attention_kernel: str | None, device: DeviceProfile
) -> tuple[nn.Module, ModelInputs, TraceOptions, Platform]:
    """What a planned job is traced with: its network on meta tensors, its batch, its options, what
    it would run on."""
    members, architecture, batch_size = (
        family(planned.family),
        planned.architecture,
        planned.options.batch_size,
    )
    changed = {
        "attention_kernel": attention_kernel,
        "checkpointing": "none",  # the network checkpoints its blocks itself
        "keeps_names": False,  # the measured loop is a function
    }
    options = TraceOptions(
        **planned.options.job_fields() | changed, loss=_loss(members, architecture, batch_size)
    )
    with torch.device("meta"):
        network = members.build(architecture)
    as_built = replace(planned.options, precision="fp32", channels_last=False)
    return (
        apply_options(network, as_built),
        _batch(members, architecture, batch_size),
        options,
        Platform.of(device, options),
    )


def traced_run(
    network: nn.Module, inputs: ModelInputs, options: TraceOptions, platform: Platform
) -> Replayed:
    """Trace a job, and replay it until its memory is steady.

    Raises:
        ExtractError: when it cannot be traced.
    """
    return steady_memory(
        record(network, inputs, options, platform).timeline, platform.device
    ).replayed


def _published(measurement: Measurement, device: DeviceProfile) -> Subject:
    """Subject of a published row; its script held the options fixed and used PyTorch's default
    switches."""
    members = published_family(measurement)
    architecture = members.parse(json.loads(measurement.architecture))
    with torch.device("meta"):
        network = members.build(architecture)
    batch_size = measurement.job.batch_size
    last = getattr(architecture, "last_batch_size", batch_size)
    return Subject(
        measurement,
        network,
        _batch(members, architecture, batch_size),
        TraceOptions(
            **PUBLISHED_OPTIONS.job_fields(),
            loss=_loss(members, architecture, batch_size),
            keeps_names=True,
            last_batch_size=last if last != batch_size else None,
            forward_passes_first=getattr(architecture, "forward_passes_first", 0),
        ),
        Platform(device=device),
    )


def _batch(members: ModuleType | Rebuilds, architecture: Any, batch_size: int) -> ModelInputs:
    inputs, _ = members.tensors(architecture)
    return ModelInputs(tuple(_tensor(spec, batch_size) for spec in inputs), {}, batch_size)


def _loss(members: ModuleType | Rebuilds, architecture: Any, batch_size: int) -> TargetLoss:
    _, target = members.tensors(architecture)
    own = getattr(members, "loss", loss)
    return TargetLoss(own, (_tensor(target, batch_size),))


def _tensor(spec: TensorSpec, batch_size: int) -> Tensor:
    dtype = torch.float32 if spec.high is None else torch.long
    return torch.empty((batch_size, *spec.shape), dtype=dtype, device="meta")


PROTOCOL: Final = "trace-8"
"""``trace-2`` since the trace follows PyTorch's CUDA code allocation by allocation
(``benchmarks/cuda_code.py``), ``trace-3`` since fp32 leaves convolutions the TF32 that PyTorch lets
them use, ``trace-4`` since the steady state is the answer and the replay knows the card's capacity,
``trace-5`` since workspaces of convolutions follow cuDNN's own answers, ``trace-6`` since they
follow published readings in fp32 on an A100 and after a search, ``trace-7`` since they shrink where
memory is short, ``trace-8`` since fp32 convolutions follow published readings on every GPU."""


def trace_recipe(
    recipe: Recipe, gpu: str, count: int, seed: int, folder: Path, workers: int | None
) -> None:
    """Label ``count`` jobs of ``recipe`` as on ``gpu`` in ``folder``; a later call continues where
    this one stopped.

    Raises:
        DatasetError: when the folder holds another campaign or cannot be written.
        InvalidRequestError: on an unknown GPU, or when the recipe does not hold so many jobs.
    """
    device = device_profile(gpu)
    with Journal(folder) as journal:
        settings = Settings(
            f"{recipe.name}, traced as on {device.name}", recipe.digest, seed, count
        )
        planned = journal.plan(settings)
        if planned is None:
            planned = sample_jobs(recipe, count, seed, device.capacity_bytes)
            journal.keep_plan(settings, planned)
        tally = Tally(count, len(journal.finished), time.monotonic())
        left = [job for job in planned if job.key not in journal.finished]
        tasks = [(job.to_dict(), job.key, recipe.name, seed, device.name) for job in left]
        with progress_bar("tracing") as show:
            for key, row in in_processes(_trace_planned, tasks, workers):
                measurement = measurement_from_dict(row)
                journal.append(key, measurement)
                tally.statuses[measurement.status] += 1
                show(*tally.progress)


def traced_measurement(
    planned: PlannedJob, recipe: str, seed: int, device: DeviceProfile
) -> Measurement:
    """One row whose label is the steady state that the trace expects; a job whose start-up takes
    more than the card has is ``oom``, as a run would be."""
    job = training_job(planned)
    row: dict[str, Any] = {
        "job": job,
        "label_source": TRACED,
        "capacity_bytes": device.capacity_bytes,
        "provenance": TRACED,
        "gpu": device.name,
        "recipe": recipe,
        "architecture": planned.architecture_json,
        "options": planned.options_json,
        "seed": seed,
        "protocol": PROTOCOL,
    }
    start = time.monotonic()
    try:
        run = traced_run(*traceable(planned, job.attention_kernel, device))
    except GpumemnetError as error:
        return Measurement(**row, status="error", reason=str(error)[:500])
    context_bytes = context(device).expected_bytes
    startup_peak_bytes = run.startup_peak_reserved_bytes + context_bytes
    if startup_peak_bytes > device.capacity_bytes:
        reason = "the trace needs more than the card has"
        return Measurement(**row, status="oom", reason=reason, context_bytes=context_bytes)
    return Measurement(
        **row,
        status="ok",
        label_state="steady",
        steady_process_bytes=run.reserved_bytes + context_bytes,
        startup_peak_bytes=startup_peak_bytes,
        peak_reserved_bytes=run.startup_peak_reserved_bytes,
        context_bytes=context_bytes,
        steps=STEADY_STEPS,
        seconds=time.monotonic() - start,
    )


def _trace_planned(
    document: dict[str, Any], key: str, recipe: str, seed: int, gpu: str
) -> tuple[str, dict[str, Any]]:
    measurement = traced_measurement(parse_planned(document), recipe, seed, device_profile(gpu))
    return key, measurement_to_dict(measurement)


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
