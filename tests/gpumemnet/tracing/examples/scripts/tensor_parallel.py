"""Each rank holds columns of one layer and rows of the next; with the word ``sharded`` two such
groups share what they hold."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "tensor"))
model = nn.Sequential(*(Block(512) for _ in range(4)), nn.Linear(512, 10)).cuda()
for block in model[:4]:
    parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if "sharded" in sys.argv:
        fully_shard(block, mesh=mesh["data"])
if "sharded" in sys.argv:
    fully_shard(model, mesh=mesh["data"])
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for _ in range(4):
    images, labels = torch.rand(64, 512, device="cuda"), torch.randint(0, 10, (64,), device="cuda")
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
