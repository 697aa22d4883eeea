"""An exponential moving average of the weights, copied from the host tensor by tensor, as
diffusers' ``EMAModel`` does; a buffer counts the steps."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
shadow = [parameter.clone().detach() for parameter in model.parameters()]
assert shadow[0].device.type == "cpu"
assert not shadow[0].is_cuda
model.register_buffer("steps", torch.zeros((), dtype=torch.long))
model.to("cuda")
shadow = [copy.to("cuda") for copy in shadow]
assert shadow[0].is_cuda
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    model(torch.randn(16, 512).to("cuda")).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for copy, parameter in zip(shadow, model.parameters(), strict=True):
            copy.lerp_(parameter, 0.001)
    model.steps += 1
    1 // int(model.steps.item() == step + 1)  # an assert would be taken to hold
