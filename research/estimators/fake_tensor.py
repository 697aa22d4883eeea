"""Estimators that run the model on fake tensors: FakeTensor as GPUMemNet ran it, and PyTorch's
MemTracker.

Both sum live tensors; neither knows the allocator, workspaces or the context.  The run is that of
the trace without its corrections for CUDA, whose allocated peak equals that of
``torch.distributed._tools.mem_tracker.MemTracker`` byte for byte
(``tests/gpumemnet/tracing/test_mem_tracker.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from torch import Tensor

from gpumemnet.extract.module_calls import tensors_in
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.timeline import MEMORY_CLASSES, live_at, peak_of
from gpumemnet.tracing.training_loop import record

from .estimator import PublishedEstimator, Subject, Training


def fake_tensor_parts(subject: Subject) -> Mapping[str, int]:
    """Peak of forward pass and ``output.sum().backward()``, with no optimizer."""
    training = subject.training()
    options = TraceOptions(
        optimizer="sgd",
        loss=_sum,
        zero_grad="after_step",
        keeps_names=False,
    )
    return _peak_parts(training, options)


def mem_tracker_parts(subject: Subject) -> Mapping[str, int]:
    """Peak of whole training steps with the job's loss and optimizer."""
    training = subject.training()
    given = training.options
    # MemTracker runs on a fake CPU, whose optimizers loop over the parameters.
    implementation = "for_loop" if given.own_optimizer is None else given.optimizer_implementation
    options = replace(
        given, optimizer_implementation=implementation, last_batch_size=None, forward_passes_first=0
    )
    return _peak_parts(training, options)


def _sum(output: object) -> Tensor:
    """The sum of all outputs with a gradient."""
    own = [tensor.sum() for tensor in tensors_in(output) if tensor.requires_grad]
    total = own[0]
    for each in own[1:]:
        total = total + each
    return total


def _peak_parts(training: Training, options: TraceOptions) -> Mapping[str, int]:
    timeline = record(
        training.network, training.inputs, options, training.platform, corrected=False
    ).timeline
    sizes = [
        0 if storage.memory_class == "workspace" else storage.size_bytes
        for storage in timeline.storages
    ]
    _, at = peak_of(timeline, sizes)
    parts = dict.fromkeys(MEMORY_CLASSES, 0)
    for index in live_at(timeline, at):
        parts[timeline.storages[index].memory_class] += sizes[index]
    return {name: size for name, size in parts.items() if size}


FAKE_TENSOR: Final = PublishedEstimator(
    name="FakeTensor",
    needs="module",
    leaves_out="loss, optimizer, allocator, workspaces, context",
    source="GPUMemNet (arXiv 2602.17817), Related_works/FakeTensor",
    parts=fake_tensor_parts,
)
MEM_TRACKER: Final = PublishedEstimator(
    name="MemTracker",
    needs="module",
    leaves_out="allocator, workspaces, context, what CUDA kernels keep otherwise than CPU kernels",
    source="PyTorch, torch/distributed/_tools/mem_tracker.py",
    parts=mem_tracker_parts,
)
