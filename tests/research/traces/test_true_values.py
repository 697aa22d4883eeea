"""A whole run with true values on a played GPU, against its trace."""

from pathlib import Path

import pytest

from benchmarks.true_values import compare
from gpumemnet.units import MIB

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, 10)).cuda()
optimizer = torch.optim.Adam(model.parameters())
images = torch.randn(4096, 256)
for step in range(8):
    batch = images[step * 256 : (step + 1) * 256].to("cuda")
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
with torch.no_grad():
    assert images[0].cuda().device.type == "cuda"
    scores = torch.cat([model(part.cuda()) for part in images.split(2048)])
    best = images.cuda()[scores.argmax(1).cpu() >= 0]
assert best.cpu().sum().item() == pytest.approx(images.sum().item(), rel=1e-3)
"""


@pytest.mark.nightly
def test_a_trace_has_the_peak_of_a_run_with_true_values(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import pytest\n" + SCRIPT)
    true, traced = compare(script)
    assert not true["error"]
    assert "scores =" in script.read_text().splitlines()[true["line"] - 1]
    assert true["bytes"] > 8 * MIB
    assert traced["requested_bytes"] == pytest.approx(true["bytes"], rel=0.01)
