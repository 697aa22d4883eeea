"""A loader that prefetches keeps three batches on a stream of its own."""

from __future__ import annotations

import torch
from torch import nn

from gpumemnet.extract.module_calls import inputs_from_example
from gpumemnet.gpu import device_profile
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.tracing.timeline import Timeline, live_at, repeated
from gpumemnet.tracing.training_loop import record
from research.traces.kept_runs import with_prefetching

DEVICE = device_profile("A100")
IMAGES = (64, 3, 224, 224)
IMAGES_BYTES = 64 * 3 * 224 * 224 * 4


def _recorded() -> Timeline:
    options = TraceOptions(optimizer="sgd", loss="cross_entropy")
    network = nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=7),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )
    inputs = inputs_from_example(torch.empty(IMAGES, device="meta"), None)
    return record(network, inputs, options, Platform.of(DEVICE, options)).timeline


def test_each_step_holds_the_current_and_the_next_batch_and_loading_holds_three() -> None:
    long = repeated(with_prefetching(_recorded()))
    images = [
        storage.memory_class == "input" and storage.size_bytes == IMAGES_BYTES
        for storage in long.storages
    ]
    live = [
        sum(images[index] for index in live_at(long, event)) for event in range(len(long.events))
    ]
    starts = long.step_starts
    assert (
        len(starts) > 4
    )  # the last step is repeated: as many storages are left as were taken over
    assert max(live) == 3
    assert {live[end - 1] for end in starts[1:]} == {2}
    copies = [storage for storage in long.storages if storage.size_bytes == IMAGES_BYTES // 4]
    assert len(copies) == len(starts)  # one batch for each step, and one ahead
    assert {
        storage.stream for storage, is_image in zip(long.storages, images, strict=True) if is_image
    } == {1}
