"""Masks, lengths and labels on the GPU: the script reads them, and selects and branches by them."""

import torch
from torch import nn

lengths = torch.tensor([10, 20, 30, 40]).to("cuda")
mask = torch.arange(64, device="cuda")[None] < lengths[:, None]
tokens = torch.randint(0, 1000, (4, 64)).cuda()
model = nn.Sequential(nn.Embedding(1000, 512), nn.Linear(512, 512)).cuda()
boxes = torch.arange(2**15).cuda() % 64 == 0
classes = boxes.view(-1, 1).expand(-1, 100) & True  # larger than masks that are read
assert len(torch.randn(2**15, 100).cuda()[classes].view(-1, 100)) == 512
del boxes, classes
wide = nn.Linear(512, 65536).cuda()  # never needed: the mask has padding
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    hidden = model(tokens)
    if mask.all():
        hidden = wide(hidden)
    kept = hidden[mask]
    assert (*kept.shape, int(mask.sum()), lengths.tolist()[3]) == (100, 512, 100, 40)
    assert (len(mask.nonzero()), len(torch.unique(lengths))) == (100, 4)
    assert (mask.device.type, mask.cpu().device.type) == ("cuda", "cpu")
    loss = kept.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
