"""A loop with accelerate: mixed precision, accumulated gradients, clipped norms."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = nn.Sequential(
    nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512), nn.GELU(), nn.Linear(512, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(
    TensorDataset(torch.randn(1024, 512), torch.randint(0, 10, (1024,))),
    batch_size=64,
    shuffle=True,
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for images, labels in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total = accelerator.gather_for_metrics(loss.detach()).mean().item()
