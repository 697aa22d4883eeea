"""Shards, block by block; with the word ``meta`` weights are made only when they are split, with
``whole`` they come before."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH, DEPTH = 1024, 6
mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))  # which begins a process group
assert dist.get_rank() == 0
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
with torch.device("meta" if "meta" in sys.argv else "cpu"):
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)),
        nn.Linear(WIDTH, 10),
    )
    frequencies = 1 / (torch.arange(8).float() + 1).to(torch.float16)
assert frequencies.is_meta == ("meta" in sys.argv)
if "whole" in sys.argv:
    model.cuda()
for block in model:
    fully_shard(block, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
if "meta" in sys.argv:
    model.to_empty(device="cuda")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    images, labels = (
        torch.rand(64, WIDTH, device="cuda"),
        torch.randint(0, 10, (64,), device="cuda"),
    )
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
