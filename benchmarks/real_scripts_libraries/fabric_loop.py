"""A loop with Lightning's Fabric."""

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cuda", devices=1, precision="16-mixed")
fabric.launch()
model = nn.Sequential(
    nn.Conv2d(3, 64, 3),
    nn.ReLU(),
    nn.Conv2d(64, 64, 3),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
samples = TensorDataset(torch.randn(256, 3, 32, 32), torch.randint(0, 10, (256,)))
for images, labels in fabric.setup_dataloaders(DataLoader(samples, batch_size=32)):
    loss = nn.functional.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    fabric.backward(loss)
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()
    fabric.print(f"{loss.item():.3f}")
