"""Two models and two optimizers."""

import torch
from torch import nn

device = torch.device("cuda:0")
generator = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 784)).to(device)
critic = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(), nn.Linear(512, 1)).to(device)
optimizer_g = torch.optim.Adam(generator.parameters())
optimizer_c = torch.optim.Adam(critic.parameters())
loss = nn.BCEWithLogitsLoss()
for _ in range(10):
    real = torch.rand(32, 784).to(device)
    fake = generator(torch.randn(32, 64, device=device))
    optimizer_c.zero_grad()
    real_loss = loss(critic(real), torch.ones(32, 1, device=device))
    fake_loss = loss(critic(fake.detach()), torch.zeros(32, 1, device=device))
    (real_loss + fake_loss).backward()
    optimizer_c.step()
    optimizer_g.zero_grad()
    loss(critic(fake), torch.ones(32, 1, device=device)).backward()
    optimizer_g.step()
