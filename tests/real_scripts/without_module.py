import torch

weights = [torch.randn(512, 512, device="cuda", requires_grad=True) for _ in range(3)]
optimizer = torch.optim.Adam(weights)
for _ in range(100):
    x = torch.randn(32, 512, device="cuda")
    for weight in weights:
        x = torch.relu(x @ weight)
    optimizer.zero_grad()
    x.sum().backward()
    optimizer.step()
