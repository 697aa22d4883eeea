"""What else scripts on several GPUs do: shared batch norms, accumulation without exchange, metrics
and objects of all ranks."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
half = dist.new_group([0, 1])
settings = [{"width": 64} if dist.get_rank() == 0 else None]
dist.broadcast_object_list(settings, src=0)
width = settings[0]["width"]
network = nn.Sequential(
    nn.Conv2d(3, width, 3),
    nn.BatchNorm2d(width),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(width * 30 * 30, 10),
)
model = DistributedDataParallel(
    nn.SyncBatchNorm.convert_sync_batchnorm(network).cuda(), find_unused_parameters=True
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    for micro_batch in range(2):
        images, labels = (
            torch.rand(8, 3, 32, 32, device="cuda"),
            torch.zeros(8, dtype=torch.long, device="cuda"),
        )
        with model.no_sync() if micro_batch == 0 else nullcontext():
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses = [torch.zeros_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss.detach())
    dist.reduce(loss.detach(), dst=0, group=half)
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, {"rank": dist.get_rank()})
    assert everybody[-1] == {"rank": 0}
assert dist.monitored_barrier() is None
