"""Traces a model: record the steps, replay them through the allocator, add the memory outside the
allocator.

The order is that of a real run: tensors (recorder), segments (caching allocator), CUDA context
(device profile).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from gpumemnet.allocator import AllocatorSettings
from gpumemnet.extract.extraction import ExtractOptions, extract_from
from gpumemnet.extract.inputs import ModelInputs
from gpumemnet.gpu import available_mib, context, device_profiles
from gpumemnet.job.json_codec import job_to_dict
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.physics.replicas import communicator_bytes
from gpumemnet.tracing.batch_sizes import BatchMemory, BatchTraces, verdict_of
from gpumemnet.tracing.losses_and_optimizers import stated_optimizer
from gpumemnet.tracing.memory import (
    curve_of,
    memory_of,
    non_allocator_memory,
    replayed,
    safe_basis,
    smallest_bytes,
)
from gpumemnet.tracing.missing_values import GuessedValues
from gpumemnet.tracing.operators.registry import KNOWN_DIFFERENCES
from gpumemnet.tracing.options import Platform, TraceRequest, with_cudnn
from gpumemnet.tracing.result import GpuFit, TraceAnswer
from gpumemnet.tracing.timeline import LongRun, Timeline, repeated
from gpumemnet.tracing.training_loop import Recording, record
from gpumemnet.units import MIB

_LOG: Final = logging.getLogger(__name__)


def not_included(timeline: Timeline) -> tuple[str, ...]:
    """Return what else a training process of such a run may use, one clause each."""
    operators = {storage.operator for storage in timeline.storages}
    known = [each for each in KNOWN_DIFFERENCES if each.is_about(operators)]
    alone = () if timeline.groups else (_ONE_GPU,)
    return (*(f"{each.name}: {each.effect}" for each in known), *_OUTSIDE, *alone)


_OUTSIDE: Final = (
    "prefetching: a second batch that is on the GPU while the first is processed",
    "an evaluation loop, metrics and logging that keep tensors on the GPU",
    "CUDA graphs",
)
_ONE_GPU: Final = (
    "several GPUs: what they exchange, and NCCL's buffers (some 0.7 GiB for each process group)"
)


def result_of_run(
    run: LongRun,
    timeline: Timeline,
    platform: Platform,
    settings: AllocatorSettings,
    *,
    model: str,
    batch_size: int,
    loss: str,
    notes: tuple[str, ...],
    with_curve: bool,
) -> TraceAnswer:
    """Return the answer for one recorded run.

    Args:
        run: the run with its last step repeated.
        timeline: the run as it was recorded.
        platform: the GPU, and the source of convolution workspaces.
        settings: settings of the allocator.
        model, batch_size, loss, notes: values of the same fields of the answer.
        with_curve: whether to include the memory over one step.
    """
    device = platform.device
    memory = memory_of(run, timeline.sizes, timeline.bounds, device, settings)
    cuda_context, outside = context(device), non_allocator_memory(device, timeline.groups)
    return TraceAnswer(
        model=model,
        gpu=device.name,
        available_bytes=available_mib(device) * MIB,
        batch_size=batch_size,
        expected_bytes=memory.expected_bytes,
        safe_bytes=memory.safe_bytes,
        startup_peak_bytes=memory.startup_peak_bytes,
        safe_basis=safe_basis(device, timeline.convolves, bool(timeline.groups)),
        parts={
            **memory.replayed.parts,
            "context": cuda_context.expected_bytes,
            "communicator": communicator_bytes(timeline.groups),
        },
        reserved_bytes=memory.replayed.reserved_bytes,
        allocated_bytes=memory.replayed.allocated_bytes,
        requested_bytes=memory.replayed.requested_bytes,
        context_bytes=cuda_context.expected_bytes,
        context_source=outside.source,
        smallest_bytes=smallest_bytes(run, timeline.sizes, device, settings),
        peak=memory.replayed.peak,
        loss=loss,
        notes=notes,
        not_included=not_included(timeline),
        curve=curve_of(run, timeline.sizes, settings, memory.replayed.capacity_bytes)
        if with_curve
        else None,
        ranks=timeline.ranks,
        convolution_workspaces=_workspace_source(platform) if timeline.convolves else None,
    )


def _workspace_source(platform: Platform) -> str:
    return "rules" if platform.cudnn is None else f"cuDNN {platform.cudnn.version}"


class ModelTracer:
    """Traces one model at several batch sizes and for several GPUs, and keeps the traces.

    Args:
        model: the model.
        inputs: what it is called with.
        request: how it is trained, the GPU, and the extra results.
        notes: what the answer's notes begin with.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: ModelInputs,
        request: TraceRequest,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._request = request
        self._platform, cudnn_notes = with_cudnn(
            Platform.of(request.gpu, request.options), request.cudnn
        )
        self._notes = (*notes, *cudnn_notes)
        self._runs: dict[int, tuple[Timeline, LongRun]] = {}

    def answer(self) -> TraceAnswer:
        """Return the memory at the job's own batch size, with the extra results."""
        inputs, extras = self._inputs, self._request.extras
        recording = self._record(inputs.batch_size, self._platform)
        timeline = recording.timeline
        answer = result_of_run(
            self._long_run(timeline),
            timeline,
            self._platform,
            self._request.allocator,
            model=type(self._model).__name__,
            batch_size=inputs.batch_size,
            loss=recording.loss,
            notes=(*self._notes, *([inputs.note] if inputs.note else []), *recording.notes),
            with_curve=extras.curve,
        )
        traces = BatchTraces(self._timeline_at, inputs.batch_size, timeline)
        memory = BatchMemory(traces, self._request.gpu, self._request.allocator, self._long_run)
        return replace(
            answer,
            batches=tuple(memory.point(size) for size in extras.batches),
            max_batch_size=memory.largest() if extras.max_batch else None,
            gpus=self._gpus(timeline) if extras.gpus else (),
            job=job_to_dict(self._job(self._unlimited_reserved_bytes(timeline)))
            if extras.job
            else None,
        )

    def _record(self, batch_size: int, platform: Platform) -> Recording:
        _LOG.info("tracing batch size %d as on %s", batch_size, platform.device.name)
        return record(
            self._model, self._inputs.resized(batch_size), self._request.options, platform
        )

    def _timeline_at(self, batch_size: int) -> Timeline:
        return self._record(batch_size, self._platform).timeline

    def _unlimited_reserved_bytes(self, timeline: Timeline) -> int:
        """Return the reserved bytes on a GPU that is large enough, as a job is described without
        its GPU."""
        run = self._long_run(timeline)
        sizes = [timeline.sizes[origin] for origin in run.origins]
        return replayed(run.timeline, sizes, self._request.allocator).reserved_bytes

    def _long_run(self, timeline: Timeline) -> LongRun:
        if id(timeline) not in self._runs:
            self._runs[id(timeline)] = (timeline, repeated(timeline))
        return self._runs[id(timeline)][1]

    def _gpus(self, own: Timeline) -> tuple[GpuFit, ...]:
        """Return the memory on every GPU of the catalogue but those of laptops; GPUs with the same
        kernels share a trace."""
        timelines = {_kernels(self._platform): own}
        fits = []
        for device in device_profiles():
            if device.is_laptop:
                continue
            platform = replace(self._platform, device=device)
            if _kernels(platform) not in timelines:
                timelines[_kernels(platform)] = self._record(
                    self._inputs.batch_size, platform
                ).timeline
            timeline = timelines[_kernels(platform)]
            memory = memory_of(
                self._long_run(timeline),
                timeline.sizes,
                timeline.bounds,
                device,
                self._request.allocator,
            )
            fits.append(
                GpuFit(
                    gpu=device.name,
                    available_bytes=available_mib(device) * MIB,
                    expected_bytes=memory.expected_bytes,
                    safe_bytes=memory.safe_bytes,
                    verdict=verdict_of(memory, device),
                )
            )
        return tuple(fits)

    def _job(self, reserved_bytes: int) -> TrainingJob:
        options = self._request.options
        alone = {} if options.parallel == "ddp" else {"ranks": 1}
        own = options.own_optimizer
        if callable(own):
            own = own(
                [parameter for parameter in self._model.parameters() if parameter.requires_grad]
            )
        optimizer = stated_optimizer(own) if isinstance(own, Optimizer) else {}
        if own is not None and not optimizer:
            _LOG.warning(
                "a job has no name for the optimizer %s; the job says %s",
                type(own).__name__,
                options.optimizer,
            )
        missing_values = GuessedValues() if options.best_effort else None
        stated = ExtractOptions(**options.job_fields() | alone | optimizer)
        job = extract_from(
            self._model, self._inputs, stated, missing_values, self._platform.device
        ).job
        return replace(job, traced_peak_bytes=reserved_bytes)


def _kernels(platform: Platform) -> tuple[Any, ...]:
    """Return the properties of a GPU that decide which operators run and what they keep.

    GPUs that differ only in the number of multiprocessors share a trace, unless cuDNN is asked: by
    the rules, that number hardly changes scratch memory.
    """
    device = None if platform.cudnn is None else platform.device.name
    return (platform.compute_capability, platform.device.blas_workspace_bytes, device)
