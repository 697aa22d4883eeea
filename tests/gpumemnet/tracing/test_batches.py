"""The largest batch size is looked for between two traces; if the run differs, each size is
traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from gpumemnet.allocator import AllocatorSettings
from gpumemnet.extract.module_calls import inputs_from_example
from gpumemnet.gpu import DeviceProfile, device_profile, with_available
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.model_tracer import BatchMemory, skeleton, timeline_between
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.tracing.timeline import Timeline
from gpumemnet.tracing.training_loop import record
from gpumemnet.units import GIB, MIB


class Traces:
    """Traces a model at any batch size, and remembers at which."""

    def __init__(self, model: nn.Module, sample: Tensor, platform: Platform) -> None:
        self.asked: list[int] = []
        self._model, self._inputs, self._platform = (
            model,
            inputs_from_example(sample, None),
            platform,
        )

    def __call__(self, batch_size: int) -> Timeline:
        self.asked.append(batch_size)
        return record(
            self._model,
            self._inputs.resized(batch_size),
            TraceOptions(optimizer="sgd"),
            self._platform,
        ).timeline


def test_every_size_is_affine_in_the_batch(
    example: Callable[[str], ModuleType], platform: Platform
) -> None:
    model = example("gpt2").build(vocabulary=512, width=64, heads=2, depth=2)
    trace = Traces(model, torch.empty(2, 128, dtype=torch.long), platform)
    lower, upper = trace(4), trace(7)
    assert skeleton(lower) == skeleton(upper)
    for batch_size in (2, 16):
        between = timeline_between(4, lower, 7, upper, batch_size)
        traced = trace(batch_size)
        assert skeleton(traced) == skeleton(upper)
        assert [storage.size_bytes for storage in between.storages if not storage.is_scratch] == [
            storage.size_bytes for storage in traced.storages if not storage.is_scratch
        ]


class Chunked(nn.Module):
    """Works through its batch eight samples at a time, so other batch sizes run other operators."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 2**17)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(part).relu() for part in torch.split(x, 8)])


@pytest.fixture
def small_gpu() -> DeviceProfile:
    return replace(with_available(device_profile("T4"), GIB), context_bytes=256 * MIB)


@pytest.mark.parametrize(
    ("model", "most_traces"),
    [(nn.Sequential(nn.Linear(64, 9000), nn.ReLU(), nn.Linear(9000, 64)), 6), (Chunked(), 99)],
)
def test_the_largest_batch_and_the_next_are_traced(
    model: nn.Module, most_traces: int, small_gpu: DeviceProfile
) -> None:
    trace = Traces(model, torch.zeros(4, 64), Platform(device=small_gpu))
    memory = BatchMemory(trace, small_gpu, AllocatorSettings())
    found = memory.largest(4)
    assert {found, found + 1} <= {*trace.asked}
    assert len(trace.asked) == len({*trace.asked}) <= most_traces
    assert memory.point(found).verdict == "yes" != memory.point(found + 1).verdict
    assert memory.largest(4, most=3) == 3


def test_none_may_fit() -> None:
    nothing = with_available(device_profile("T4"), MIB)
    trace = Traces(nn.Linear(64, 64), torch.zeros(4, 64), Platform(device=nothing))
    assert BatchMemory(trace, nothing, AllocatorSettings()).largest(4) == 0
