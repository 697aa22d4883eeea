"""xMem on a run written by hand, and on a small network that really runs."""

from typing import Any

import torch
from torch import nn

from gpumemnet.extract.module_calls import ModelInputs
from gpumemnet.gpu import device_profile
from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.units import MIB
from research.estimators.estimator import Subject
from research.estimators.xmem import XMEM, Block, blocks_of, kept_blocks, stream

from .test_estimators import Run

GPU = device_profile("RTX 3060")
JOB = TrainingJob(
    family="mlp",
    batch_size=256,
    input_elements=1_024,
    optimizer="adam",
    precision="fp32",
    layers=(Layer("linear", 1, 1_024),),
)
MATRIX = 4 * MIB


def span(name: str, start: float, end: float, cat: str = "user_annotation") -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start}


def memory(at: float, size: int, address: int) -> dict[str, Any]:
    return {
        "ph": "i",
        "name": "[memory]",
        "ts": at,
        "args": {"Bytes": size, "Addr": address, "Device Type": 0},
    }


def test_a_block_belongs_to_the_part_of_the_program_that_allocated_it() -> None:
    events = [
        span("xmem layer", 10, 20),
        span("aten::linear", 11, 19, "cpu_op"),
        memory(12, 100, 1),  # a temporary of the layer
        memory(13, 200, 2),  # its output
        memory(15, -100, 1),
        span("aten::add", 22, 24, "cpu_op"),
        memory(23, 300, 1),  # the address is used again, outside of a layer
        span("xmem loss", 30, 40),
        memory(31, 50, 3),
        memory(32, -50, 3),
        span("autograd::engine::evaluate_function: AddmmBackward0", 50, 60, "cpu_op"),
        memory(52, 400, 4),
        memory(70, -200, 2),
        memory(71, -900, 9),  # allocated before the profile began
    ]
    blocks = blocks_of(events)
    assert blocks == [
        Block(100, 12, 15, "layer", 20),
        Block(200, 13, 70, "layer", 20),
        Block(300, 23, float("inf"), "operator", 24),
        Block(50, 31, 32, "loss", 40),
        Block(400, 52, float("inf"), "backward", 60),
    ]
    kept = kept_blocks(blocks, [400])
    assert [block.size_bytes for block in kept] == [200, 300, 50, 400]
    assert stream(kept, [400]) == ([0, 1, 2, 3, ~3, 4, ~1], [400, 200, 300, 50, 400])


def run() -> Run:
    with torch.device("meta"):
        network = nn.Sequential(nn.Linear(1_024, 1_024), nn.ReLU(), nn.Linear(1_024, 1_024))
    inputs = ModelInputs((torch.empty(256, 1_024, device="meta"),), {}, 256)
    return Run(network, inputs, TraceOptions(optimizer="adam", loss="mse"), Platform(device=GPU))


def test_a_small_network_really_runs() -> None:
    estimate = XMEM.estimate(Subject(JOB, GPU, 100 * MIB, {}, run))
    # Weights, gradients and two moments of two matrices; four activations of a MiB; Adam's
    # temporary as large as a matrix or two.
    reserved = estimate.total_bytes - 100 * MIB
    assert 8 * MATRIX + 4 * MIB <= reserved <= 12 * MATRIX + 22 * MIB
    assert estimate.parts["context"] == 100 * MIB
