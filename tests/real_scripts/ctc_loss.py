"""CTC loss on the GPU, with noise from a subclass of tensors that has attributes of its own."""

import torch
from torch import nn


class Noise(torch.Tensor):
    def to(self, *args):
        moved = Noise(self)
        moved.scale, moved.data = self.scale, super().to(*args)
        return moved


noise = Noise(torch.empty(50, 16, 64))
noise.scale = 2
noise = noise.to("cuda")
model = nn.Linear(64, 100).cuda()
optimizer = torch.optim.Adam(model.parameters())
targets = torch.ones(16, 10, dtype=torch.long, device="cuda")
lengths = torch.full((16,), 50), torch.full((16,), 10)
for _ in range(3):
    logs = model(noise.normal_(0, noise.scale)).log_softmax(2)
    loss = nn.functional.ctc_loss(logs, targets, *lengths)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
