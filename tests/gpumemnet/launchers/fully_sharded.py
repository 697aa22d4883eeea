"""A script that trains with FullyShardedDataParallel and writes how much is allocated when."""

import gc
import json
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

WIDTH = 255
SEEN: dict[str, dict[str, int]] = {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note("forward")
        hidden = torch.relu(self.up(x))
        hidden.register_hook(lambda gradient: self.note("backward"))  # type: ignore[no-untyped-call]
        result: torch.Tensor = self.down(hidden)
        return result

    def note(self, when: str) -> None:
        SEEN[name].setdefault(when, torch.cuda.memory_allocated())


dist.init_process_group("nccl")
torch.cuda.set_device(dist.get_rank())
model: Any
loss: Any
for name, options in json.loads(sys.argv[1]).items():
    model = loss = None
    gc.collect()
    before = torch.cuda.memory_allocated()
    dtype = torch.bfloat16 if options.get("bf16") else None
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), *[Block() for _ in range(4)]),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.cuda.current_device(),
        use_orig_params=options.get("original", False),
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=dtype) if dtype else None,
        sharding_strategy=ShardingStrategy[options.get("strategy", "FULL_SHARD")],
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE if options.get("prefetch") else None,
        cpu_offload=CPUOffload(options.get("offload", False)),
        limit_all_gathers=not options.get("unlimited", False),
    )
    SEEN[name] = {"before": before, "sharded": torch.cuda.memory_allocated()}
    loss = model(torch.randn(1, WIDTH, device="cuda")).float().sum()
    SEEN[name]["between"] = torch.cuda.memory_allocated()
    loss.backward()

optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(1, WIDTH, device="cuda")).float().sum().backward()
    optimizer.step()
    SEEN[name]["stepped"] = torch.cuda.memory_allocated()
    # A file that is opened in text mode ends with the trace.
    subprocess.run(
        ["tee", sys.argv[2]], input=json.dumps(SEEN).encode(), check=True
    )  # not followed
