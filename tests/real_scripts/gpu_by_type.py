"""The default type of tensors is one of the GPU, types are asked for, and weights are assigned."""

import os

import torch
from torch import nn

assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"

torch.set_default_tensor_type("torch.cuda.FloatTensor")
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
model[0].weight.data = torch.randn(512, 256)
optimizer = torch.optim.Adam(
    model.parameters(), lr=torch.tensor(1e-3, device="cuda"), capturable=True
)
for _ in range(3):
    x = model[0].weight.new(64, 256).normal_()
    assert x.type() == "torch.cuda.FloatTensor"
    assert torch.rand(2).is_cuda
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
