"""Autocast with a gradient scaler, accumulation, clipping, a scheduler, workers, and an evaluation
loop that is never reached."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.rand(3, 32, 32), index % 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(64 * 16 * 16, 10)
        self.register_buffer("mean", torch.tensor([0.5, 0.5, 0.5]).view(3, 1, 1))

    def forward(self, x):
        return self.head(self.body(x - self.mean).flatten(1))


torch.backends.cudnn.benchmark = True
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model.cuda()  # after the optimizer was made: the parameters keep their identity
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
scaler = torch.amp.GradScaler("cuda")
losses = []
print(
    torch.cuda.get_device_name(),
    torch.cuda.get_device_properties(0).total_memory,
    torch.cuda.mem_get_info(),
)
loader = DataLoader(Images(), batch_size=8, num_workers=2, pin_memory=False)
for _ in range(3):
    for index, (images, labels) in enumerate(loader):
        images, labels = images.cuda(non_blocking=True), labels.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(images), labels) / 2
        scaler.scale(loss).backward()
        if index % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        losses.append(loss.detach().cpu().numpy())
        print(f"{loss.item():.3f} {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB")
    scheduler.step()
model.eval()
raise AssertionError("the trace should have ended long before")
