"""A report of a bug: one step; and weights that are compared by their addresses, as before a
checkpoint is saved."""

import torch
from torch import nn

model = nn.Linear(1024, 1024).cuda()
assert model.weight.untyped_storage().data_ptr() != model.bias.untyped_storage().data_ptr()
assert model.weight.data_ptr() == model.weight.untyped_storage().data_ptr()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(32, 1024, device="cuda")).sum().backward()
optimizer.step()
