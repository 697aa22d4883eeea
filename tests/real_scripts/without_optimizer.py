"""Parameters without a module, updated without an optimizer, as tutorials do it."""

import torch

device = torch.device("cuda:0")
x, y = torch.randn(64, 256, device=device), torch.randn(64, 10, device=device)
first = torch.randn(256, 512, device=device, requires_grad=True)
second = torch.randn(512, 10, device=device, requires_grad=True)
for step in range(500):
    loss = (x.mm(first).clamp(min=0).mm(second) - y).pow(2).sum()
    if step % 100 == 99:
        print(step, loss.item())
    loss.backward()
    with torch.no_grad():
        first -= 1e-6 * first.grad
        second -= 1e-6 * second.grad
        first.grad = second.grad = None
