"""One of several GPUs: PyTorch's own data parallelism on meta tensors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.several_gpus import traced as peaks_of_job
from gpumemnet import trace
from gpumemnet.errors import ExtractError, InvalidJobError, InvalidRequestError
from gpumemnet.extract.checkpointing import blocks
from gpumemnet.extract.module_calls import inputs_from_example
from gpumemnet.tracing import ExtraResults
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.tracing.timeline import Timeline
from gpumemnet.tracing.training_loop import record
from gpumemnet.units import MIB
from tests.gpumemnet.tracing.test_record import bytes_by_class, end_of_step
from tests.nightly import nightly

FIXTURE = Path(__file__).parents[2] / "fixtures" / "several_gpus_peaks.json"
MODELS = Path(__file__).parents[1] / "extract" / "examples"
FLOAT, WIDTH, DEPTH = 4, 64, 4


class Tower(nn.Module):
    """Blocks of one size, and a head: ``fully_shard`` takes each block for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


BLOCK = WIDTH * WIDTH + WIDTH
HEAD = WIDTH * 10 + 10
PARAMETERS = DEPTH * BLOCK + HEAD


def recorded(
    model: nn.Module, platform: Platform, parallel: str, ranks: int, **options: Any
) -> Timeline:
    chosen = TraceOptions(parallel=parallel, ranks=ranks, **options)
    return record(
        model, inputs_from_example(torch.zeros(8, WIDTH), None), chosen, platform
    ).timeline


def share(*dimensions: tuple[int, int], ranks: int) -> int:
    """Elements that the first rank holds of parameters with so many rows of so many elements: whole
    rows."""
    return sum(ceil(rows / ranks) * columns for rows, columns in dimensions)


def test_replicas_hold_their_gradients_twice(platform: Platform) -> None:
    held = bytes_by_class(
        timeline := recorded(Tower(), platform, "ddp", 2), end_of_step(timeline, 2)
    )
    assert held["parameter"] == held["gradient"] == FLOAT * PARAMETERS
    assert held["optimizer_state"] == 2 * FLOAT * PARAMETERS
    assert (
        held["communication"] == FLOAT * PARAMETERS
    )  # the bucket; views of it are not PyTorch's default


@pytest.mark.parametrize(("parallel", "ranks"), [("fsdp", 2), ("fsdp", 7), ("fsdp_zero2", 2)])
def test_a_rank_holds_its_shards(platform: Platform, parallel: str, ranks: int) -> None:
    timeline = recorded(Tower(), platform, parallel, ranks)
    held = bytes_by_class(timeline, end_of_step(timeline, 2))
    block = share((WIDTH, WIDTH), (WIDTH, 1), ranks=ranks)
    mine = FLOAT * (DEPTH * block + share((10, WIDTH), (10, 1), ranks=ranks))
    assert held["parameter"] == held["gradient"] == mine
    assert held["optimizer_state"] == 2 * mine
    assert held["communication"] == 0


def held_after_forward(timeline: Timeline) -> Counter[str]:
    backward = next(
        phase.start for phase in timeline.phases if (phase.name, phase.step) == ("backward", 2)
    )
    return bytes_by_class(timeline, backward - 1)


def gathered_after_forward(timeline: Timeline) -> int:
    return held_after_forward(timeline)["communication"]


def test_what_is_gathered_between_the_passes(platform: Platform) -> None:
    assert (
        gathered_after_forward(recorded(Tower(), platform, "fsdp", 2)) == FLOAT * HEAD
    )  # what is left is not given up
    assert (
        gathered_after_forward(recorded(Tower(), platform, "fsdp_zero2", 2)) == FLOAT * PARAMETERS
    )
    halved = recorded(Tower(), platform, "fsdp_zero2", 2, precision="amp_bf16")
    assert gathered_after_forward(halved) == 2 * PARAMETERS


def test_the_streams_of_sharding_have_pools_of_their_own(platform: Platform) -> None:
    assert recorded(Tower(), platform, "ddp", 2).streams is None
    timeline = recorded(Tower(), platform, "fsdp", 2)
    assert len(set(timeline.streams or ())) == 3  # gathers, reduces, and all else
    gathers = {
        each.stream
        for each in timeline.storages
        if each.memory_class == "communication" and each.operator == "empty"
    }
    assert 0 not in gathers


def test_the_model_is_left_as_it_was(platform: Platform) -> None:
    model = Tower()
    before = {
        name: (id(module), type(module), sorted(module.__dict__))
        for name, module in model.named_modules()
    }
    values = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    hooks = [
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()
    ]
    lines = [recorded(model, platform, parallel, 4) for parallel in ("fsdp", "ddp", "fsdp", "ddp")]
    assert lines[0].events == lines[2].events
    assert lines[1].events == lines[3].events
    assert {
        name: (id(module), type(module), sorted(module.__dict__))
        for name, module in model.named_modules()
    } == before
    assert [
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()
    ] == hooks
    for name, parameter in model.named_parameters():
        assert id(parameter) == values[name][0]
        assert torch.equal(parameter, values[name][1])
        assert parameter.grad is None
    assert not dist.is_initialized()
    assert not hasattr(torch, "meta")
    model(torch.zeros(2, WIDTH)).sum().backward()


def test_batch_norms_keep_autocast(platform: Platform) -> None:
    def noted(model: nn.Module) -> str:
        options = TraceOptions(precision="amp_bf16", parallel="fsdp", ranks=2)
        return " ".join(
            record(model, inputs_from_example(torch.zeros(8, WIDTH), None), options, platform).notes
        )

    assert "gathered in bfloat16" in noted(Tower())
    assert "gathered in" not in noted(nn.Sequential(Tower(), nn.BatchNorm1d(10)))


def test_an_optimizer_of_ones_own_and_weights_that_are_shared(platform: Platform) -> None:
    model = Tower()
    model.blocks[1][0].weight = model.blocks[0][0].weight  # type: ignore[index]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(
        ExtractError, match=r"the parameter 'blocks.0.0.weight' is shared by blocks"
    ):
        recorded(model, platform, "fsdp", 2, own_optimizer=optimizer)
    model = Tower()
    tied = recorded(
        model,
        platform,
        "fsdp",
        2,
        own_optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
    held = bytes_by_class(tied, end_of_step(tied, 2))
    assert held["optimizer_state"] == held["parameter"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parallel": "fsdp"}, "fsdp needs at least 2 GPUs"),
        ({"ranks": 8}, "8 GPUs need a value of parallel: use ddp, fsdp, fsdp_zero2"),
        (
            {"parallel": "zero9", "ranks": 2},
            "must be one of none, ddp, fsdp, fsdp_zero2, not 'zero9'",
        ),
        ({"parallel": "ddp", "ranks": 0}, "must be between 1 and 65536, not 0"),
        ({"parallel": "ddp", "ranks": True}, "must be a whole number, not true"),
        (
            {"parallel": "fsdp", "ranks": 2, "precision": "amp_fp16"},
            "amp_fp16 is not supported with sharded parameters",
        ),
        (
            {"parallel": "fsdp", "ranks": 2, "extras": ExtraResults(job=True)},
            "can describe replicas .*, not shards",
        ),
    ],
)
def test_plans_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises((InvalidJobError, InvalidRequestError), match=said):
        trace(Tower(), torch.zeros(8, WIDTH), **options)


def test_an_answer_adds_up_and_says_what_it_is_of(example: Callable[[str], ModuleType]) -> None:
    model = example("gpt2").build(depth=1, width=128, heads=4, vocabulary=1000)
    inputs = torch.zeros(2, 64, dtype=torch.long)
    one, two, eight = (
        trace(model, inputs, parallel=parallel, ranks=ranks, gpu="A10")
        for parallel, ranks in (("none", 1), ("ddp", 2), ("fsdp", 8))
    )
    for answer in (one, two, eight):
        assert sum(answer.parts.values()) == answer.expected_bytes
        assert answer.expected_bytes < answer.safe_bytes
    assert one.parts["communication"] == one.parts["communicator"] == 0
    assert (two.parts["communicator"], eight.parts["communicator"]) == (544 * MIB, 688 * MIB)
    assert two.allocated_bytes > one.allocated_bytes > eight.allocated_bytes
    assert any("several GPUs" in clause for clause in one.not_included)
    assert not any("several GPUs" in clause for clause in eight.not_included)
    assert "NCCL" in eight.safe_basis
    assert any("the first of 8 ranks" in note for note in eight.notes)


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="the peaks are those of torch 2.13"
)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp", *nightly(["fsdp_zero2"])])
def test_a_rank_reserves_what_pytorch_reserves(parallel: str) -> None:
    """Against PyTorch's own CUDA code, as ``benchmarks/several_gpus.py --jobs 30 --seed 2`` ran it,
    counting memory.

    The fixture holds the job of each family and way that is traced fastest, whatever its figures.
    """
    jobs = [job for job in json.loads(FIXTURE.read_text())["jobs"] if job["parallel"] == parallel]
    assert len(jobs) == 3
    for job in jobs:
        requested, allocated, reserved = peaks_of_job(job)
        assert abs(requested - job["requested"]) <= MIB, job
        assert abs(allocated - job["allocated"]) <= MIB, job
        assert reserved == job["reserved"], job


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(WIDTH, WIDTH), Tower()]) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for linear, tower in self.layers:  # type: ignore[misc]
            x = linear(x) + tower(x).mean()  # type: ignore[has-type]
        return x


def test_lists_that_nobody_calls_are_no_blocks(platform: Platform) -> None:
    found = blocks(Pairs())
    assert [type(block) for block in found] == [nn.Linear, Tower] * 3
    assert recorded(Pairs(), platform, "fsdp", 2).streams
    plain, recomputed = (
        recorded(Pairs(), platform, "none", 1, checkpointing=each)
        for each in ("none", "every_block")
    )
    assert (
        held_after_forward(recomputed)["saved_activation"]
        < held_after_forward(plain)["saved_activation"]
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(()))),
            "'scale' is a single number",
        ),
        (
            lambda model: setattr(model.head, "weight", nn.Parameter(torch.zeros(WIDTH, 10).T)),
            "is not contiguous",
        ),
    ],
)
def test_parameters_that_cannot_be_sharded(
    platform: Platform, change: Callable[[nn.Module], None], said: str
) -> None:
    model = Tower()
    change(model)
    with pytest.raises(ExtractError, match=said):
        recorded(model, platform, "fsdp", 2)
