"""Replicas, as ``torchrun`` starts them: a process for each GPU, a sampler that splits the data, a
loss that is averaged."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    own = torch.tensor([5]).to(device)
    sizes = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, own)
    assert sum(map(int, sizes)) == 5 * dist.get_world_size()
    del own, sizes
    network = nn.Sequential(
        nn.Linear(512, 2048), nn.BatchNorm1d(2048), nn.ReLU(), nn.Linear(2048, 512)
    )
    model = DistributedDataParallel(network.to(device), device_ids=[device.index])
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.rand(4096, 512))
    loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
    assert len(loader) == 4096 // dist.get_world_size() // 64
    for epoch in range(10):
        for (batch,) in loader:
            batch = batch.to(device)
            loss = F.mse_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if dist.get_rank() == 0:
                print(epoch, shown.item())
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
