"""A run that was traced at a prime batch size gives the same memory at other batch sizes as a trace
at each of them."""

from __future__ import annotations

import torch
from torch import nn

from gpumemnet.extract.module_calls import ModelInputs, inputs_from_example
from gpumemnet.gpu import device_profile
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.tracing.timeline import steady_memory
from gpumemnet.tracing.training_loop import record
from research.traces.batch_scaling import PRIMES, scalable_run

A100 = device_profile("A100")


class Small(nn.Sequential):
    """Convolutions whose workspaces do not grow in proportion to the batch, and a matrix
    product."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 5, padding=2),
            nn.GroupNorm(2, 8),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(128, 10),
        )


def test_another_batch_size_is_as_traced() -> None:
    options = TraceOptions(optimizer="adamw", cudnn_benchmark=True)
    platform = Platform.of(A100, options)

    def inputs(batch_size: int) -> ModelInputs:
        return inputs_from_example(torch.empty(batch_size, 3, 32, 32), None)

    run = scalable_run(Small(), inputs(PRIMES[0]), options, platform)
    for batch_size in (2, 16, PRIMES[0]):
        expected = record(Small(), inputs(batch_size), options, platform).timeline
        found, _ = run.at(batch_size, platform)
        assert sorted((s.memory_class, s.size_bytes) for s in found.storages) == sorted(
            (s.memory_class, s.size_bytes) for s in expected.storages
        )
        assert (
            steady_memory(found, A100).replayed.reserved_bytes
            == steady_memory(expected, A100).replayed.reserved_bytes
        )
        assert [(phase.name, phase.step, phase.start) for phase in found.phases] == [
            (phase.name, phase.step, phase.start) for phase in expected.phases
        ]


def test_the_largest_workspaces_are_those_of_the_batch_size() -> None:
    options = TraceOptions(cudnn_benchmark=True)
    platform = Platform.of(A100, options)
    inputs = inputs_from_example(torch.empty(PRIMES[0], 3, 32, 32), None)
    run = scalable_run(Small(), inputs, options, platform)
    small, large = (run.at(batch, platform)[1] for batch in (2, 64))
    assert 0 < small["convolution"] < large["convolution"]
    assert small["convolution"] <= small["convolution_benchmark"] < large["convolution_benchmark"]
