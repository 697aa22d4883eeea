"""``torch.compile`` in scripts: what is saved, fused and reused, against hand counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpumemnet.launchers.launch_line import Launch
from gpumemnet.tracing.script.start import trace_script
from tests.gpumemnet.tracing import script_child
from tests.nightly import nightly

ROWS, WIDTH = 4096, 1024
TENSOR = 4 * ROWS * WIDTH

SCRIPT = """
import torch
from torch import nn
model = nn.Sequential({layers}).cuda()
{before}
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for _ in range(3):
    x = torch.randn({rows}, {width}, device="cuda")
    {forward}.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LINEAR = f"nn.Linear({WIDTH}, {WIDTH})"
GELU = f"{LINEAR}, nn.GELU(), nn.LayerNorm({WIDTH}), {LINEAR}"
BREAKS = """
class Prints(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
    def forward(self, x):
        print("a graph break")
        return self.inner(x)
model = torch.compile(Prints(model))
"""
BROKEN = """
from types import SimpleNamespace
from torch._inductor.graph import GraphLowering
FAILS = "\\ndef call(args): raise RuntimeError('no memory')"
codegen = GraphLowering.codegen
def broken(lowered):
    code = codegen(lowered)[0].value
    if lowered.is_backward:
        {how}
    return [SimpleNamespace(value=code)]
GraphLowering.codegen = broken
"""
"""Backward passes cannot be planned, or fail."""
CACHE = """
class Cached(nn.Sequential):
    def forward(self, x):
        return torch.cat([torch.tensor([], device=x.device), super().forward(x)])
model = torch.compile(Cached(model))
assert len(model._orig_mod) == 1 and type(model).__name__ == "OptimizedModule"
"""
WAYS = {
    "model": ("model = torch.compile(model)", "model(x)"),
    "in place": ("model.compile()", "model(x)"),
    "function": ("function = torch.compile(lambda x: model(x), fullgraph=True)", "function(x)"),
    "graph break": (BREAKS, "model(x)"),
}


WEIGHTS = 4 * (2 * (WIDTH**2 + WIDTH) + 2 * WIDTH)
LAST_GRADIENTS = 4 * (WIDTH**2 + WIDTH)
MEAN_AND_DEVIATION = 2 * 4 * ROWS
WORKSPACES = 2 * (8 << 20) + (256 << 10)
SCALARS = 2 * 4
"""The loss, and the gradient of it."""
PARTIAL_SUMS = 4 * 32 * WIDTH
"""Of the gradients of the layer norm's weights, in two stages."""


def traced(folder: Path, before: str, forward: str = "model(x)") -> Any:
    script = folder / "train.py"
    script.write_text(
        SCRIPT.format(layers=GELU, before=before, forward=forward, rows=ROWS, width=WIDTH)
    )
    return script_child.traced(script, (), None)


@pytest.mark.parametrize("way", ["graph break", *nightly(["model", "function", "in place"])])
def test_what_is_saved_fused_and_freed(way: str, tmp_path: Path) -> None:
    """The peak is in the backward pass of the GELU and the layer norm.  Kept are the input and what
    the first layer returns, from which the output of the GELU is computed again; what the layer norm
    returned is freed.  One kernel makes the gradient of the first layer from that of the second."""
    answer = traced(tmp_path, *WAYS[way])
    saved, gradients = 2 * TENSOR + MEAN_AND_DEVIATION + SCALARS, 2 * TENSOR + PARTIAL_SUMS
    assert answer["requested_bytes"] == (WEIGHTS + LAST_GRADIENTS + saved + gradients + WORKSPACES)
    assert any("Inductor's own plan" in note for note in answer["notes"])
    assert answer["batch_size"] == ROWS


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return traced(tmp_path_factory.mktemp("eager"), "")


@pytest.mark.parametrize(
    ("before", "note"),
    [
        ('import os; os.environ["TORCH_COMPILE_DISABLE"] = "1"', "torch.compile was left out"),
        (BROKEN.format(how="code += FAILS"), "(no memory)"),
        *nightly(
            [(BROKEN.format(how='raise RuntimeError("no kernel")'), "Sequential is not captured")]
        ),
    ],
)
def test_what_is_not_compiled_takes_what_it_takes_eagerly(
    before: str, note: str, eager: Any, tmp_path: Path
) -> None:
    compiled, forward = WAYS["model"]
    answer = traced(tmp_path, f"{before}\n{compiled}", forward)
    assert eager["parts"]["saved_activation"] == 3 * TENSOR + MEAN_AND_DEVIATION + SCALARS
    assert answer["requested_bytes"] == eager["requested_bytes"]
    assert sum(note in each for each in answer["notes"]) == 1


@pytest.mark.parametrize(
    ("value", "note"), [("0", "Inductor's own plan"), *nightly([("1", "left out")])]
)
def test_a_command_compiles_where_it_is_asked_to(
    value: str, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        SCRIPT.format(layers=LINEAR, before=CACHE, forward="model(x)", rows=8, width=WIDTH)
    )
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", value)
    assert sum(note in each for each in trace_script(Launch(str(script))).notes) == 1
