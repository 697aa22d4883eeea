"""``nn.DataParallel`` on the GPUs that there are, as in PyTorch's example for ImageNet; and its parts."""

import torch
from torch import nn
from torch.overrides import has_torch_function

model = nn.DataParallel(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))).cuda()
batches = nn.parallel.scatter(torch.randn(64, 256).cuda(), [0])
outputs = nn.parallel.parallel_apply(nn.parallel.replicate(model.module, [0]), batches)
gathered = nn.parallel.gather(outputs, 0)
assert gathered.get_device() == 0
assert not has_torch_function((gathered, None))
del batches, outputs, gathered
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(64, 256).cuda(non_blocking=True)).pow(2).mean().backward()
    optimizer.step()
