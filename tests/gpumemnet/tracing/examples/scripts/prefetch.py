"""The next batch is copied on a stream of its own while the present one is worked on."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
side, started = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
started.record()


def fetch():
    with torch.cuda.stream(side):
        return torch.rand(4096, 1024).pin_memory().to("cuda", non_blocking=True)


following = fetch()
for _ in range(4):
    torch.cuda.current_stream().wait_stream(side)
    batch = following
    batch.record_stream(torch.cuda.current_stream())
    following = fetch()
    loss = model(batch).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
