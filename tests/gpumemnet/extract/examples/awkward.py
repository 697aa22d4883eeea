"""Models that name devices, read values while they are built, or load weights, as real repositories
do."""

import os
import time

import torch
from torch import nn


def on_cuda(path: str):
    torch.set_default_device("cuda")
    model = nn.Sequential(
        nn.Linear(8, 600), nn.BatchNorm1d(600), nn.ReLU(), nn.Linear(600, 2)
    ).cuda()
    model.load_state_dict(torch.load(path))
    model.register_buffer("large", torch.zeros(200, 200, device="cuda:0"))
    return model.to("cuda", torch.float32), torch.zeros(4, 8).to(
        torch.device("cuda"), non_blocking=True
    )


def prints_and_forks():
    if os.fork() == 0:
        time.sleep(600)
    print("hello from the factory")
    os.write(1, b"hello from file descriptor 1\n")
    return nn.Linear(8, 4)


def transformed():
    lazy = nn.Sequential(nn.LazyLinear(600), nn.LazyBatchNorm1d())
    compiled = torch.compile(nn.Sequential(nn.ReLU(), nn.Linear(600, 4)))
    return nn.Sequential(
        lazy, compiled, torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    )
