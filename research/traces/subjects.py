"""Makes dataset rows traceable: the network, its batch, its loss and its options, as they were
measured."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dataset_builder.families import TensorSpec, family
from dataset_builder.measure.training import meta_network
from dataset_builder.recipe.planned_job import PlannedJob, parse_options
from gpumemnet.extract.inputs import ModelInputs
from gpumemnet.gpu.catalogue import DeviceProfile
from gpumemnet.job.measurement import Measurement
from gpumemnet.tracing.losses_and_optimizers import TargetLoss
from gpumemnet.tracing.memory import Replayed, steady_memory
from gpumemnet.tracing.options import Platform, TraceOptions
from gpumemnet.tracing.training_loop import record
from research.published_tables.networks import Rebuilds, published_family
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
    name = "zoo" if "model" in document else measurement.job.family
    planned = PlannedJob(
        name, family(name).parse(document), parse_options(json.loads(measurement.options))
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
        "checkpointing": "none",
    }  # the network checkpoints its blocks itself
    options = TraceOptions(
        **planned.options.job_fields() | changed, loss=_loss(members, architecture, batch_size)
    )
    return (
        meta_network(planned),
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


def _batch(members: Rebuilds, architecture: Any, batch_size: int) -> ModelInputs:
    inputs, _ = members.tensors(architecture)
    return ModelInputs(tuple(_tensor(spec, batch_size) for spec in inputs), {}, batch_size)


def _loss(members: Rebuilds, architecture: Any, batch_size: int) -> TargetLoss:
    _, target = members.tensors(architecture)
    return TargetLoss(members.loss, (_tensor(target, batch_size),))


def _tensor(spec: TensorSpec, batch_size: int) -> Tensor:
    dtype = torch.float32 if spec.high is None else torch.long
    return torch.empty((batch_size, *spec.shape), dtype=dtype, device="meta")
