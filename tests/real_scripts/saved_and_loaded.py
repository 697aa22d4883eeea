"""The best model so far is saved, and loaded again by the same run: once as a state, once as a
whole module."""

import tempfile
from pathlib import Path

import torch
from torch import nn

folder = Path(tempfile.mkdtemp())
model = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512)).to("cuda")
optimizer = torch.optim.Adam(model.parameters())
torch.save(
    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3},
    folder / "last.pt",
)
with (folder / "best.pt").open("wb") as file:
    torch.save(model, file)

state = torch.load(folder / "last.pt", map_location="cpu")
assert state["epoch"] == 3
assert {tensor.device.type for tensor in state["model"].values()} == {"cpu"}
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
with (folder / "best.pt").open("rb") as file:
    teacher = torch.load(
        file, weights_only=False
    )  # a second model, on the GPU as the first one was
assert next(teacher.parameters()).device.type == "cuda"
for _ in range(3):
    with torch.no_grad():
        target = teacher(torch.randn(64, 512).to("cuda"))
    loss = (model(torch.randn(64, 512).to("cuda")) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
