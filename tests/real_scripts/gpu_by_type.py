"""The default type of tensors is one of the GPU, types are asked for, and weights are assigned; a
worker of a data loader starts anew."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader

assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"

torch.set_default_tensor_type("torch.cuda.FloatTensor")
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
model[0].weight.data = torch.randn(512, 256)
assert torch.Tensor([1.0, 2.0], device=model[0].weight.device).is_cuda
optimizer = torch.optim.Adam(
    model.parameters(), lr=torch.tensor(1e-3, device="cuda"), capturable=True
)
loader = DataLoader(
    range(3), num_workers=1, multiprocessing_context="spawn", generator=torch.Generator("cuda")
)
for _ in loader:
    x = model[0].weight.new(64, 256).normal_()
    assert x.type() == "torch.cuda.FloatTensor"
    assert torch.rand(2).is_cuda
    1 // int((torch.linspace(0, 1, 3, device="cuda") == 0.5).sum().item())  # a known value
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
