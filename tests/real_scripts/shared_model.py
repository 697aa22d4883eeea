"""Processes that train one model on the GPU, as in Hogwild."""

import torch
import torch.multiprocessing as mp
from torch import nn


def train(rank: int, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(
            model(torch.rand(64, 256).to("cuda")), torch.randint(0, 10, (64,)).to("cuda")
        ).backward()
        optimizer.step()


if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 10)).to("cuda")
    model.share_memory()
    processes = []
    for rank in range(4):
        process = mp.Process(target=train, args=(rank, model))
        process.start()
        processes.append(process)
    for process in processes:
        process.join()
