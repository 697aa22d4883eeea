"""Traces a model, also at other batch sizes: record the steps, replay them through
the allocator, add the memory outside the allocator.

The order is that of a real run: tensors (recorder), segments (caching allocator), CUDA context
(device profile).  :class:`BatchMemory` looks for the largest batch size between traces: storage
sizes are affine in the batch size, and two traces give each as ``a + b·batch``.  The answer is traced
again.  Scratch memory of libraries is not affine; it is interpolated linearly and never below zero.
"""

from __future__ import annotations

import logging
from bisect import bisect
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Final

from torch import nn
from torch.optim import Optimizer

from gpumemnet.allocator import AllocatorSettings
from gpumemnet.atomic_files import shipped_json
from gpumemnet.extract.extraction import ExtractOptions, extract_from
from gpumemnet.extract.module_calls import ModelInputs
from gpumemnet.gpu import (
    YES,
    DeviceProfile,
    available_mib,
    context,
    verdict_of,
)
from gpumemnet.job.json_codec import job_to_dict
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.tracing.api import TraceRequest
from gpumemnet.tracing.losses_and_optimizers import stated_optimizer
from gpumemnet.tracing.missing_values import GuessedValues
from gpumemnet.tracing.operators.rules import Platform, with_cudnn
from gpumemnet.tracing.result import BatchPoint, TraceAnswer
from gpumemnet.tracing.timeline import (
    Memory,
    Timeline,
    curve_of,
    memory_of,
    non_allocator_memory,
    phases_of,
    repeated,
    replayed,
    safe_basis,
    smallest_bytes,
    steady_memory,
)
from gpumemnet.tracing.training_loop import Recording, record
from gpumemnet.units import MIB

_LOG: Final = logging.getLogger(__name__)


def not_included(timeline: Timeline) -> tuple[str, ...]:
    """Return what else a training process of such a run may use, one clause each."""
    operators = {storage.operator for storage in timeline.storages}
    known = [
        f"{each['name']}: {each['effect']}"
        for each in shipped_json("tracing/known_differences.json")
        if any(part in name for name in operators for part in each["concerns"])
    ]
    alone = () if timeline.groups else (_ONE_GPU,)
    return (*known, *_OUTSIDE, *alone)


_OUTSIDE: Final = (
    "prefetching: a second batch that is on the GPU while the first is processed",
    "an evaluation loop, metrics and logging that keep tensors on the GPU",
    "CUDA graphs",
)
_ONE_GPU: Final = (
    "several GPUs: what they exchange, and NCCL's buffers (some 0.7 GiB for each process group)"
)


def result_of_run(
    run: Timeline,
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
        platform: the GPU, and the source of convolution workspaces.
        settings: settings of the allocator.
        model, batch_size, loss, notes: values of the same fields of the answer.
        with_curve: whether to include the memory over one step.
    """
    device = platform.device
    memory = memory_of(run, device, settings)
    cuda_context, outside = context(device), non_allocator_memory(device, run.groups)
    workspaces = "rules" if platform.cudnn is None else f"cuDNN {platform.cudnn.version}"
    is_searched_by_rules = platform.cudnn_benchmark and run.convolves and platform.cudnn is None
    return TraceAnswer(
        model=model,
        gpu=device.name,
        available_bytes=available_mib(device) * MIB,
        batch_size=batch_size,
        expected_bytes=memory.expected_bytes,
        safe_bytes=memory.safe_bytes,
        startup_peak_bytes=None if is_searched_by_rules else memory.startup_peak_bytes,
        safe_basis=safe_basis(device, run),
        parts={
            **memory.replayed.parts,
            "context": cuda_context.expected_bytes,
            "communicator": outside.expected_bytes - cuda_context.expected_bytes,
        },
        reserved_bytes=memory.replayed.reserved_bytes,
        allocated_bytes=memory.replayed.allocated_bytes,
        requested_bytes=memory.replayed.requested_bytes,
        context_bytes=cuda_context.expected_bytes,
        context_source=outside.source,
        smallest_bytes=smallest_bytes(run, device, settings),
        peak=memory.replayed.peak,
        loss=loss,
        notes=notes,
        not_included=not_included(run),
        curve=curve_of(run, settings, memory.replayed.capacity_bytes) if with_curve else None,
        ranks=run.ranks,
        phases=phases_of(run, 0, {}),
        convolution_workspaces=workspaces if run.convolves else None,
    )


class ModelTracer:
    """Traces one model at several batch sizes, and keeps the traces.

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
        self._recorded = cache(self._record)

    def answer(self) -> TraceAnswer:
        """Return the memory at the job's own batch size, with the extra results."""
        inputs, extras = self._inputs, self._request.extras
        recording = self._recorded(inputs.batch_size)
        run = repeated(recording.timeline)
        answer = result_of_run(
            run,
            self._platform,
            self._request.allocator,
            model=type(self._model).__name__,
            batch_size=inputs.batch_size,
            loss=recording.loss,
            notes=(*self._notes, *([inputs.note] if inputs.note else []), *recording.notes),
            with_curve=extras.curve,
        )
        memory = BatchMemory(
            lambda size: self._recorded(size).timeline,
            self._request.gpu,
            self._request.allocator,
        )
        return replace(
            answer,
            batches=tuple(memory.point(size) for size in extras.batches),
            max_batch_size=memory.largest(inputs.batch_size) if extras.max_batch else None,
            job=job_to_dict(self._job(replayed(run, self._request.allocator).reserved_bytes))
            if extras.job
            else None,
        )

    def _record(self, batch_size: int) -> Recording:
        _LOG.info("tracing batch size %d as on %s", batch_size, self._platform.device.name)
        return record(
            self._model, self._inputs.resized(batch_size), self._request.options, self._platform
        )

    def _job(self, reserved_bytes: int) -> TrainingJob:
        """Return the traced job.  It takes ``reserved_bytes`` on a GPU that is large enough: a job
        is described without its GPU."""
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
        stated = ExtractOptions(**options.job_fields() | alone | optimizer)
        job = extract_from(
            self._model, self._inputs, stated, GuessedValues(), self._platform.device
        ).job
        return replace(job, traced_peak_bytes=reserved_bytes)


def skeleton(timeline: Timeline) -> tuple[list[int], list[tuple[str, str, str]]]:
    """Return events and storages of a run without sizes and without scratch memory, which depends
    on sizes."""
    numbers: dict[int, int] = {}
    roles: list[tuple[str, str, str]] = []
    for index, storage in enumerate(timeline.storages):
        if not storage.is_scratch:
            numbers[index] = len(roles)
            roles.append((storage.memory_class, storage.operator, storage.module))
    events = []
    for event in timeline.events:
        index = event if event >= 0 else ~event
        if index in numbers:
            events.append(numbers[index] if event >= 0 else ~numbers[index])
    return events, roles


def timeline_between(
    low: int, lower: Timeline, high: int, upper: Timeline, batch_size: int
) -> Timeline:
    """Return the timeline at ``batch_size``, with the expected bytes and the upper bounds of the
    storages of ``upper`` on the lines through the same run at two batch sizes.

    Scratch memory that only one of them has is assumed to be proportional to the batch size.
    """
    has_same = len(lower.storages) == len(upper.storages)
    before = iter([storage for storage in lower.storages if has_same or not storage.is_scratch])
    storages = []
    for storage in upper.storages:
        start, size, bound = 0, 0, 0
        if has_same or not storage.is_scratch:
            other = next(before)
            start, size, bound = low, other.size_bytes, other.bound_bytes
        share = (batch_size - start) / (high - start)
        ends = ((size, storage.size_bytes), (bound, storage.bound_bytes))
        size, bound = (max(0, round(first + share * (last - first))) for first, last in ends)
        storages.append(replace(storage, size_bytes=size, bound_bytes=bound))
    return replace(upper, storages=tuple(storages))


def point_of(batch_size: int, memory: Memory | TraceAnswer, verdict: str) -> BatchPoint:
    """Return what an answer says of a batch size."""
    return BatchPoint(
        batch_size=batch_size,
        expected_bytes=memory.expected_bytes,
        safe_bytes=memory.safe_bytes,
        verdict=verdict,
    )


MAX_BATCH_SIZE: Final = 2**20
"""Largest batch size that is searched."""


class BatchMemory:
    """The memory at any batch size on one GPU.

    Args:
        trace: traces at a batch size.
        device: the GPU.
        settings: settings of the caching allocator.
    """

    def __init__(
        self, trace: Callable[[int], Timeline], device: DeviceProfile, settings: AllocatorSettings
    ) -> None:
        self._trace = trace
        self._device = device
        self._settings = settings
        self._traced: dict[int, Timeline] = {}
        self._are_same = cache(
            lambda low, high: skeleton(self._traced[low]) == skeleton(self._traced[high])
        )

    def exact(self, batch_size: int) -> Memory:
        """Return the memory at a batch size, which is traced."""
        if batch_size not in self._traced:
            self._traced[batch_size] = self._trace(batch_size)
        return steady_memory(self._traced[batch_size], self._device, self._settings)

    def point(self, batch_size: int) -> BatchPoint:
        """Return the memory at a batch size, which is traced, and whether it fits."""
        memory = self.exact(batch_size)
        return point_of(batch_size, memory, verdict_of(memory, self._device))

    def largest(self, batch_size: int, most: int = MAX_BATCH_SIZE) -> int:
        """Return the largest batch size that fits, 0 if none does; it and the next larger one are
        traced.

        Args:
            batch_size: the batch size of the job.
            most: the largest batch size to try.
        """
        own = max(2, batch_size)  # at batch size 1 strides are ambiguous, other code may run
        for size in (own, own + 1):
            self.exact(size)
        while True:
            low, high = 0, 1
            while high <= most and self._fits(high):
                low, high = high, 2 * high
            high = min(high, most + 1)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._fits(middle) else (low, middle)
            new = {low, high} - {0, most + 1, *self._traced}
            if not new:
                return low
            for size in new:
                self.exact(size)

    def _fits(self, batch_size: int) -> bool:
        known = sorted({*self._traced} - {1})
        # the nearest two, on both sides if possible
        first = min(max(bisect(known, batch_size) - 1, 0), len(known) - 2)
        low, high = known[first : first + 2]
        if batch_size in self._traced or not self._are_same(low, high):
            memory = self.exact(batch_size)
        else:
            lower, upper = self._traced[low], self._traced[high]
            between = timeline_between(low, lower, high, upper, batch_size)
            memory = steady_memory(between, self._device, self._settings)
        return verdict_of(memory, self._device) == YES
