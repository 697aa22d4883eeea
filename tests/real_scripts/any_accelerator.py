"""The training loop of PyTorch's examples: ``torch.accelerator``, and the loss in an f-string."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

assert torch.accelerator.is_available()
device = torch.accelerator.current_accelerator()
torch.accelerator.set_device_index(0)
assert torch.device(0) == torch.device("cuda", 0)
loader = DataLoader(
    TensorDataset(torch.randn(300, 256), torch.randint(10, (300,))), batch_size=100, pin_memory=True
)
model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.Adam(model.parameters())


@torch.compile(mode="max-autotune", fullgraph=True)
def loss_of(images, labels):
    return nn.functional.cross_entropy(model(images), labels)


for images, labels in loader:
    optimizer.zero_grad()
    loss = loss_of(images.to(device), labels.to(device))
    print(f"{loss:.4f} {loss} {torch.accelerator.max_memory_allocated():,}")
    loss.backward()
    optimizer.step()
    torch.accelerator.synchronize()
