"""Saved tensors go to pinned host memory, one block is recomputed with constants of the host, one is
not compiled."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """Adds a bias that it computes on the host, as T5 and BOFT do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(512, 512)

    @torch._dynamo.disable()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer."""
        positions = torch.arange(512)
        bias = (positions[None] - positions[:, None]).abs().float().log1p()
        return self.layer(x) @ bias.to(x.device)


blocks = nn.ModuleList(Block() for _ in range(4)).cuda()
torch._dynamo.reset()
traced = torch.jit.trace(blocks[0], torch.rand(2, 512).cuda())
optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
for _ in range(3):
    x = torch.rand(1024, 512).cuda()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        for block in blocks[:2]:
            x = block(x).relu()
    for block in blocks[2:]:
        x = checkpoint(block, x, use_reentrant=False)
    optimizer.zero_grad()
    x.square().mean().backward()
    optimizer.step()
