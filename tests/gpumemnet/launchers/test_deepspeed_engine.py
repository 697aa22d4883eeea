"""DeepSpeed's engine on the simulated GPU, its states counted by hand."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from gpumemnet.launchers.launch_line import parse_launch
from gpumemnet.tracing.script.start import trace_script

pytest.importorskip("deepspeed", reason="needs DeepSpeed, which the trace runs")

RANKS, WIDTH, LAYERS, BUCKET = 8, 300, 3, 100_000
ELEMENTS = LAYERS * (WIDTH * WIDTH + WIDTH)
PADDED = -(-ELEMENTS // (2 * RANKS)) * 2 * RANKS
"""Partitions begin at multiples of 4 bytes (``nccl_start_alignment_factor``)."""
PARTITION = LAYERS * (-(-WIDTH * WIDTH // RANKS) + -(-WIDTH // RANKS))
"""Stage 3 splits each parameter by itself."""

_SCRIPT = """
import argparse, deepspeed, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--steps", type=int, default=3)
deepspeed.add_config_arguments(parser)
args = parser.parse_args()
model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for _ in range(args.steps):
    output = engine(torch.randn(4, 300, dtype=torch.bfloat16, device=engine.device))
    engine.backward(output.float().pow(2).mean())
    engine.step()
"""


def answer(zero: dict[str, Any], folder: Path, steps: int = 3, **others: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"reduce_bucket_size": BUCKET, **zero},
        **others,
    }
    (folder / "ds.json").write_text(json.dumps(config))
    (folder / "train.py").write_text(_SCRIPT)
    line = f"deepspeed --num_gpus {RANKS} {folder}/train.py --steps {steps} --deepspeed_config {folder}/ds.json"
    launch = parse_launch(shlex.split(line))
    return trace_script(launch)


def test_stage_1_keeps_whole_gradients_while_it_accumulates(tmp_path: Path) -> None:
    found = answer({"stage": 1}, tmp_path, 6, gradient_accumulation_steps=2)
    assert found.parts["parameter"] == 2 * PADDED + 4 * PADDED // RANKS
    assert found.parts["optimizer_state"] == 8 * PADDED // RANKS
    assert found.parts["gradient"] == 2 * ELEMENTS
    assert found.parts["communication"] == 2 * BUCKET
    assert any("the first of 8 ranks" in note for note in found.notes)
    assert not found.branches


@pytest.mark.nightly
def test_stage_2_with_overlap_has_two_buckets(tmp_path: Path) -> None:
    found = answer({"stage": 2, "overlap_comm": True}, tmp_path)
    assert found.parts["parameter"] == 2 * PADDED + 4 * PADDED // RANKS
    assert found.parts["optimizer_state"] == 8 * PADDED // RANKS
    assert found.parts["communication"] == 2 * 2 * BUCKET
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    gradients = (2 + 4) * PADDED // RANKS  # in 16 bits, and in fp32 while the optimizer steps
    states = found.parts["parameter"] + found.parts["optimizer_state"] + gradients
    _, estimated = estimate_zero2_model_states_mem_needs(PADDED, RANKS, cpu_offload=False)
    assert states == estimated


def test_stage_3_keeps_small_parameters_whole(tmp_path: Path) -> None:
    found = answer({"stage": 3, "stage3_param_persistence_threshold": WIDTH}, tmp_path)
    whole = LAYERS * RANKS * -(-WIDTH // RANKS)  # the biases, padded
    assert found.parts["parameter"] - 2 * whole == 2 * PARTITION + 4 * PARTITION
    assert found.parts["optimizer_state"] == 8 * PARTITION
    assert found.parts["gradient"] == 2 * PARTITION
    assert found.parts["communication"] >= 2 * BUCKET + 2 * WIDTH * WIDTH


def test_offloaded_states_are_not_on_the_gpu(tmp_path: Path) -> None:
    cpu = {"device": "cpu"}
    found = answer({"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}, tmp_path)
    assert found.parts["optimizer_state"] == 0
    assert found.parts["communication"] == 2 * BUCKET
    host = found.host
    assert host is not None
    weights = 4 * LAYERS * WIDTH * WIDTH  # each process builds the model in fp32
    assert host.tensor_bytes == weights  # without tensors below 64 KiB
    assert host.pinned_bytes == 2 * 2**18  # fp32 weights and gradients, in blocks of a power of two
    assert host.node_bytes == RANKS * host.tensor_bytes
