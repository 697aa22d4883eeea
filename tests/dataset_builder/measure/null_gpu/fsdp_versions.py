"""Trains one of transformers' language models with FSDP 1 or 2 for four steps: ``fsdp_versions.py VERSION MODEL``."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoConfig, AutoModelForCausalLM

TYPES: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}

version, name = sys.argv[1:]
dist.init_process_group("nccl")
torch.cuda.set_device(0)
config = AutoConfig.for_model(name, num_hidden_layers=4, use_cache=False, is_decoder=True)
with torch.device("cuda"):
    model = AutoModelForCausalLM.from_config(config)
blocks = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
if version == "1":
    policy = ModuleWrapPolicy({type(blocks[0])})
    model = FullyShardedDataParallel(
        model, None, None, None, policy, mixed_precision=MixedPrecision(**TYPES)
    )
else:
    for module in (*blocks, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(**TYPES))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    tokens = torch.zeros(2, 256, dtype=torch.int64, device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
