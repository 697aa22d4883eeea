"""Replicas that the script starts itself, one for each GPU that it finds."""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, world_size):
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    model = DistributedDataParallel(nn.Linear(1024, 1024).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.rand(8, 1024).to(rank)).mean().backward()
        optimizer.step()


if __name__ == "__main__":
    mp.spawn(train, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count())
