"""PyTorch's FullyShardedDataParallel on the simulated GPU, against counts by hand."""

from __future__ import annotations

import json
from math import ceil
from pathlib import Path
from typing import Any, Final

import pytest

from gpumemnet.launchers.launch_line import Launch
from gpumemnet.tracing import trace_script
from gpumemnet.tracing.api import TraceOptions, checked_request

SCRIPT = Path(__file__).with_name("fully_sharded.py")
RANKS, DEPTH, WIDTH = 8, 4, 255
FLOAT, HALF = 4, 2
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "one unit": {"bf16": True},
    "prefetched": {"bf16": True, "prefetch": True},
    "views": {"bf16": True, "prefetch": True, "original": True},
    "kept": {"bf16": True, "strategy": "SHARD_GRAD_OP"},
    "whole": {"strategy": "NO_SHARD"},
    "hybrid": {"bf16": True, "strategy": "HYBRID_SHARD"},
    "offloaded": {"bf16": True, "offload": True},
    "fp32": {"unlimited": True},
}


def padded(elements: int) -> int:
    """The elements of a flat parameter that is split evenly."""
    return RANKS * ceil(elements / RANKS)


BLOCK, ROOT = padded(8 * WIDTH * WIDTH + 5 * WIDTH), padded(WIDTH * WIDTH + WIDTH)
MINE = FLOAT * (DEPTH * BLOCK + ROOT) // RANKS
"""Bytes of this rank's shards in fp32."""


def near(amount_bytes: float) -> Any:
    """Equal but for the activations of one row."""
    return pytest.approx(amount_bytes, abs=48 * 1024)


def test_flat_shards_and_gathered_units(tmp_path: Path) -> None:
    file = tmp_path / "seen.json"
    answer = trace_script(
        Launch(str(SCRIPT), arguments=(json.dumps(OPTIONS), str(file)), ranks=RANKS)
    )
    assert any("limit_all_gathers=False" in note for note in answer.notes)
    seen = json.loads(file.read_text())
    sharded, forward, between, backward = (
        {name: each[when] - each["before"] for name, each in seen.items()}
        for when in ("sharded", "forward", "between", "backward")
    )
    for name in OPTIONS:
        held = {"whole": FLOAT * (DEPTH * BLOCK + ROOT), "offloaded": 0}.get(name, MINE)
        assert sharded[name] == near(held), name  # shards stay in fp32
        size = FLOAT if "bf16" not in OPTIONS[name] else HALF
        gathered = 0 if name == "whole" else size * (ROOT + BLOCK)
        assert forward[name] == near(held + gathered), name
        left = {"whole": 0, "kept": HALF * (DEPTH * BLOCK + ROOT)}.get(name, size * ROOT)
        assert between[name] == near(held + left), name
    gradient = 4 * WIDTH * WIDTH  # of the down projection
    assert backward["fp32"] == near(MINE + FLOAT * (ROOT + BLOCK + gradient))
    assert backward["prefetched"] - backward["one unit"] == near(HALF * BLOCK)
    assert backward["views"] == near(backward["prefetched"])
    assert seen["fp32"]["stepped"] - seen["fp32"]["before"] == near(4 * MINE)


OFFLOADING = """
import torch
from torch.distributed import init_process_group
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

init_process_group("nccl")
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024, bias=False) for _ in range(4)])
for module in (*model, model):
    fully_shard(module, offload_policy=CPUOffloadPolicy())
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.rand(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_fully_shard_offloads_shards_gradients_and_states(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(OFFLOADING)
    answer = trace_script(Launch(str(script), ranks=RANKS))
    assert answer.parts["parameter"] == answer.parts["optimizer_state"] == 0
    assert answer.host is not None
    assert answer.host.pinned_bytes == 4 * 1024 * 1024 * FLOAT // RANKS


LOSS_OF_SHARDS = """
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
dist.init_process_group("nccl")
head = torch.nn.Linear(64, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(head.parameters())
for _ in range(3):
    logits = head(torch.randn(1024, 64, device="cuda"))
    logits = DTensor.from_local(logits, init_device_mesh("cuda", (8,)), [Shard(1)])
    with loss_parallel():
        target = torch.randint(8 * 4096, (1024,), device="cuda")
        torch.nn.functional.cross_entropy(logits, target).backward()
    optimizer.step()
"""


def test_classes_of_a_loss_are_split(tmp_path: Path) -> None:
    script = tmp_path / "loss.py"
    script.write_text(LOSS_OF_SHARDS)
    answer = trace_script(Launch(str(script), ranks=RANKS))
    local = FLOAT * 1024 * 4096
    assert 9 * local < answer.allocated_bytes < 11 * local  # 9.1 by PyTorch's own CUDA code


TIED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
dist.init_process_group("nccl")
torch.cuda.set_device(0)
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30_000, 1024)
        self.blocks = nn.Sequential(Block(), Block(), Block(), Block())
        self.head = nn.Linear(1024, 30_000, bias=False)
        self.head.weight = self.embedding.weight
    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))
with torch.device("cuda"):
    model = Model()
mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
policy = ModuleWrapPolicy({Block})
model = FullyShardedDataParallel(model, None, None, None, policy, mixed_precision=mixed)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    tokens = torch.zeros(2, 512, dtype=torch.long, device="cuda")
    loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_tied_gradients_are_added_where_units_are_gathered(tmp_path: Path) -> None:
    script = tmp_path / "tied.py"
    script.write_text(TIED)
    reserved_bytes = trace_script(
        Launch(str(script), ranks=RANKS), checked_request(TraceOptions(), "H200")
    ).reserved_bytes
    assert reserved_bytes == 1_201_668_096  # by PyTorch's own CUDA code
