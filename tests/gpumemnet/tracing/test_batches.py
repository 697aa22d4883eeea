"""Other batch sizes are interpolated from two traces; if the run differs, they are traced."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from gpumemnet.extract.module_calls import inputs_from_example
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.model_tracer import BatchTraces, affine_sizes, largest_batch
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.tracing.timeline import Timeline, peak_of
from gpumemnet.tracing.training_loop import record


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
    lines = affine_sizes((4, trace(4)), (7, trace(7)))
    assert lines is not None
    for batch_size in (2, 16):
        assert lines.agrees_with(batch_size, trace(batch_size))


class Chunked(nn.Module):
    """Works through its batch eight samples at a time, so other batch sizes run other operators."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(part).relu() for part in torch.split(x, 8)])


def test_a_run_that_changes_with_the_batch_is_traced(platform: Platform) -> None:
    trace = Traces(Chunked(), torch.zeros(16, 64), platform)
    traces = BatchTraces(trace, 16)
    for batch_size in (5, 16, 24, 65):
        timeline, sizes, _ = traces.sizes(batch_size)
        if batch_size in traces.traced:
            assert sizes == timeline.sizes
    assert {5, 24, 65} <= set(trace.asked)


def test_interpolated_sizes_need_no_trace(platform: Platform) -> None:
    trace = Traces(nn.Linear(64, 64), torch.zeros(16, 64), platform)
    traces = BatchTraces(trace, 16)
    for batch_size in range(2, 200):
        traces.sizes(batch_size)
    assert sorted(trace.asked) == [16, 17, 33]


@pytest.mark.parametrize(
    "model", [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)), Chunked()]
)
def test_the_largest_batch_is_that_of_a_plain_search(model: nn.Module, platform: Platform) -> None:
    trace = Traces(model, torch.zeros(4, 64), platform)

    def peak(batch_size: int, traces: BatchTraces) -> int:
        timeline, sizes, _ = traces.sizes(batch_size)
        tensors = [
            0 if s.memory_class == "workspace" else size
            for s, size in zip(timeline.storages, sizes, strict=True)
        ]
        return peak_of(timeline, tensors)[0]

    traces = BatchTraces(trace, 4)
    exactly = BatchTraces(trace, 4)
    capacity = 300_000
    found = largest_batch(traces, lambda batch: peak(batch, traces) <= capacity)
    exactly.exact(found), exactly.exact(found + 1)
    assert peak(found, exactly) <= capacity < peak(found + 1, exactly)
    assert largest_batch(traces, lambda batch: False) == 0
