"""Everything is made on the GPU by default, with other old and new ways to name it."""

import io

import torch
from torch import nn

file = io.BytesIO()  # a checkpoint of an earlier run
torch.serialization.save({"weight": torch.zeros(256, 256)}, file)
file.seek(0)
weights = torch.load(file, map_location="cuda")
assert weights["weight"].is_cuda

torch.set_default_device("cuda")
assert torch.get_default_device().type == "cuda"
model = nn.Linear(256, 256)
assert model.weight.is_cuda
generator = torch.Generator("cuda").manual_seed(3)
assert isinstance(generator, torch.Generator)
assert generator.device.type == "cuda"
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    with torch.cuda.device(0):
        batch = torch.randn(32, 256, generator=generator)
        labels = torch.zeros(32, 256, device="cpu").type(torch.cuda.FloatTensor)
    assert isinstance(labels, torch.cuda.FloatTensor)
    assert labels.type(torch.FloatTensor).device.type == "cpu"
    nn.functional.mse_loss(model(batch), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] > 0
    print(torch.cuda.memory_summary())
    torch.cuda.set_rng_state(torch.cuda.random.get_rng_state())
