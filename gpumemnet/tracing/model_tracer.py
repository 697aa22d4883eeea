"""Traces a model: record the steps, replay them through the allocator, add the memory outside the allocator.

The order is that of a real run: tensors (recorder), segments (caching allocator), CUDA context (device profile).
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Final

from torch import nn

from gpumemnet.allocator import AllocatorSettings
from gpumemnet.errors import InvalidRequestError
from gpumemnet.extract.extraction import extract_from
from gpumemnet.extract.inputs import ModelInputs
from gpumemnet.extract.options import ExtractOptions
from gpumemnet.gpu.catalogue import DeviceProfile, context, device_profiles
from gpumemnet.job.json_codec import job_to_dict
from gpumemnet.job.layers import describe
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.job.training_options import OPTIMIZERS
from gpumemnet.physics.nccl import communicator_bytes
from gpumemnet.tracing.batch_sizes import BatchTraces, largest_batch
from gpumemnet.tracing.corrections import CORRECTIONS
from gpumemnet.tracing.memory import Memory, curve_of, memory_of, smallest_bytes
from gpumemnet.tracing.missing_values import GuessedValues
from gpumemnet.tracing.non_allocator_memory import non_allocator_memory
from gpumemnet.tracing.options import ExtraResults, TraceOptions
from gpumemnet.tracing.platform import Platform
from gpumemnet.tracing.replay import replayed
from gpumemnet.tracing.report.answer import BatchPoint, GpuFit, TraceAnswer
from gpumemnet.tracing.safe_bytes import safe_basis
from gpumemnet.tracing.step import Recording, record
from gpumemnet.tracing.timeline import LongRun, Timeline, repeated

_LOG: Final = logging.getLogger(__name__)


def not_included(timeline: Timeline) -> tuple[str, ...]:
    """Return what else a training process of such a run may use, one clause each."""
    operators = {storage.operator for storage in timeline.storages}
    known = [each for each in CORRECTIONS if each.effect and each.is_about(operators)]
    alone = () if timeline.groups else (_ONE_GPU,)
    return (*(f"{each.name}: {each.effect}" for each in known), *_OUTSIDE, *alone)


_OUTSIDE: Final = (
    "prefetching: a second batch that is on the GPU while the first is processed",
    "an evaluation loop, metrics and logging that keep tensors on the GPU",
    "CUDA graphs",
)
_ONE_GPU: Final = "several GPUs: what they exchange, and NCCL's buffers (some 0.7 GiB for each process group)"


def answer_for(
    run: LongRun,
    timeline: Timeline,
    device: DeviceProfile,
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
        device: the GPU.
        settings: settings of the allocator.
        model, batch_size, loss, notes: values of the same fields of the answer.
        with_curve: whether to include the memory over one step.
    """
    memory = memory_of(run, timeline.sizes, timeline.bounds, device, settings)
    alone, other = context(device), non_allocator_memory(device, timeline.groups)
    return TraceAnswer(
        model=model,
        gpu=device.name,
        capacity_bytes=device.capacity_bytes,
        batch_size=batch_size,
        expected_bytes=memory.expected_bytes,
        safe_bytes=memory.safe_bytes,
        startup_peak_bytes=memory.startup_peak_bytes,
        safe_basis=safe_basis(timeline.convolves, bool(timeline.groups)),
        parts={**memory.run.parts, "context": alone.expected_bytes, "communicator": communicator_bytes(timeline.groups)},
        reserved_bytes=memory.run.reserved_bytes,
        allocated_bytes=memory.run.allocated_bytes,
        requested_bytes=memory.run.requested_bytes,
        context_bytes=alone.expected_bytes,
        context_source=other.source,
        smallest_bytes=smallest_bytes(run, timeline.sizes, device, settings),
        peak=memory.run.peak,
        loss=loss,
        notes=notes,
        not_included=not_included(timeline),
        curve=curve_of(run, timeline.sizes, settings, memory.run.capacity_bytes) if with_curve else None,
        ranks=timeline.ranks,
    )


class ModelTracer:
    """Traces one model at several batch sizes and for several GPUs, and keeps the traces.

    Args:
        model: the model.
        inputs: what it is called with.
        options: how it is trained.
        platform: the GPU, and the switches that decide which kernels run.
        settings: of the caching allocator.
        notes: what the answer's notes begin with.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: ModelInputs,
        options: TraceOptions,
        platform: Platform,
        settings: AllocatorSettings,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._options = options
        self._platform = platform
        self._settings = settings
        self._notes = notes
        self._traces = BatchTraces(self._timeline, inputs.batch_size)
        self._recording: Recording | None = None
        self._runs: dict[int, tuple[Timeline, LongRun]] = {}

    def answer(self, extras: ExtraResults) -> TraceAnswer:
        """Return the memory at the job's own batch size, with the extra results."""
        timeline = self._traces.exact(self._inputs.batch_size)
        assert self._recording is not None
        answer = answer_for(
            self._long(timeline),
            timeline,
            self._platform.device,
            self._settings,
            model=type(self._model).__name__,
            batch_size=self._inputs.batch_size,
            loss=self._recording.loss,
            notes=(*self._notes, *([self._inputs.note] if self._inputs.note else []), *self._recording.notes),
            with_curve=extras.curve,
        )
        return replace(
            answer,
            batches=tuple(self._point(size) for size in extras.batches),
            max_batch_size=self._max_batch() if extras.max_batch else None,
            gpus=self._gpus() if extras.gpus else (),
            job=job_to_dict(self._job(self._unlimited_reserved_bytes(timeline))) if extras.job else None,
        )

    def _unlimited_reserved_bytes(self, timeline: Timeline) -> int:
        """Return the reserved bytes on a GPU that is large enough, as a job is described without its GPU."""
        run = self._long(timeline)
        return replayed(run.timeline, [timeline.sizes[origin] for origin in run.origins], self._settings).reserved_bytes

    def _timeline(self, batch_size: int) -> Timeline:
        _LOG.info("tracing batch size %d", batch_size)
        recording = record(self._model, self._inputs.resized(batch_size), self._options, self._platform)
        self._recording = self._recording or recording
        return recording.timeline

    def _long(self, timeline: Timeline) -> LongRun:
        if id(timeline) not in self._runs:
            self._runs[id(timeline)] = (timeline, repeated(timeline))
        return self._runs[id(timeline)][1]

    def _memory_at(self, batch_size: int) -> Memory:
        timeline, sizes, bounds = self._traces.sizes(batch_size)
        return memory_of(self._long(timeline), sizes, bounds, self._platform.device, self._settings)

    def _point(self, batch_size: int) -> BatchPoint:
        if batch_size < 1:
            raise InvalidRequestError(f"must be at least 1, not {describe(batch_size)}", "batches")
        memory = self._memory_at(batch_size)
        return BatchPoint(
            batch_size=batch_size,
            expected_bytes=memory.expected_bytes,
            safe_bytes=memory.safe_bytes,
            fits=memory.safe_bytes <= self._platform.device.capacity_bytes,
            traced=batch_size in self._traces.traced,
        )

    def _max_batch(self) -> int:
        capacity = self._platform.device.capacity_bytes
        return largest_batch(self._traces, lambda batch: self._memory_at(batch).safe_bytes <= capacity)

    def _gpus(self) -> tuple[GpuFit, ...]:
        """Return the memory on every GPU of the catalogue; GPUs with the same kernels share a trace."""
        own = self._platform
        timelines = {_kernels(own): self._traces.exact(self._inputs.batch_size)}
        fits = []
        for device in device_profiles():
            platform = replace(own, device=device)
            if _kernels(platform) not in timelines:
                _LOG.info("tracing as on %s", device.name)
                timelines[_kernels(platform)] = record(self._model, self._inputs, self._options, platform).timeline
            timeline = timelines[_kernels(platform)]
            memory = memory_of(self._long(timeline), timeline.sizes, timeline.bounds, device, self._settings)
            fits.append(
                GpuFit(
                    gpu=device.name,
                    capacity_bytes=device.capacity_bytes,
                    expected_bytes=memory.expected_bytes,
                    safe_bytes=memory.safe_bytes,
                    fits=memory.safe_bytes <= device.capacity_bytes,
                )
            )
        return tuple(fits)

    def _job(self, reserved_bytes: int) -> TrainingJob:
        options = self._options
        alone = {} if options.parallel == "ddp" else {"ranks": 1}
        optimizer = {"optimizer": OPTIMIZERS[0]} if options.own_optimizer is not None else {}
        missing_values = GuessedValues() if options.best_effort else None
        stated = ExtractOptions(**options.job_fields() | alone | optimizer)
        job = extract_from(self._model, self._inputs, stated, missing_values).job
        return replace(job, traced_peak_bytes=reserved_bytes)


def _kernels(platform: Platform) -> tuple[Any, ...]:
    """Return the properties of a GPU that decide which operators run and what they keep.

    GPUs that differ only in the number of multiprocessors share a trace: that number hardly changes scratch memory.
    """
    return (platform.compute_capability, platform.device.blas_workspace_bytes)
