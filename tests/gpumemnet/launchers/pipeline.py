"""A script that trains a pipeline, with as many stages on each rank as its argument says."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

WIDTH, MICROBATCHES, COUNT = 256, 8, int(sys.argv[1])
dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()


def stage(number: int) -> Any:
    block = nn.Sequential(nn.Linear(WIDTH, 1024), nn.GELU(), nn.Linear(1024, WIDTH)).cuda()
    return PipelineStage(block, number, COUNT * ranks, torch.device("cuda", 0))


stages = [stage(rank + ranks * each) for each in range(COUNT)]
schedule: Any = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD([each for part in stages for each in part.submod.parameters()], 0.1)
for _ in range(3):
    optimizer.zero_grad()
    rows = torch.randn(MICROBATCHES * 512, WIDTH, device="cuda")
    schedule.step(
        *((rows,) if rank == 0 else ()), **({"target": rows} if rank == ranks - 1 else {})
    )
    optimizer.step()
