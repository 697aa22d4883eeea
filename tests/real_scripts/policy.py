import torch
from torch import nn
from torch.distributions import Categorical, Normal

policy, critic = nn.Linear(4, 64).cuda(), nn.Linear(64, 1).cuda()
optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()])
for _ in range(100):
    observed = torch.rand(32, 4).cuda()
    hidden = policy(observed)
    choice = Categorical(logits=hidden)
    action = choice.sample()
    width = Normal(hidden, torch.ones_like(hidden))
    loss = (
        critic(hidden).mean()
        - choice.log_prob(action).mean()
        - width.log_prob(width.sample()).mean()
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
