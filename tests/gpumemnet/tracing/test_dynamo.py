"""A trace does without Dynamo, and leaves it to those who want it."""

from __future__ import annotations

from tests.torch_forks import FORKS

PROGRAM = """
import sys, torch
from torch import nn
import gpumemnet

gpumemnet.trace(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.zeros(2, 4), optimizer="adamw")
assert "torch._dynamo" not in sys.modules, "it is loaded"

class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        import torch._dynamo.config
        assert not torch._dynamo.is_compiling() and torch._dynamo.config.cache_size_limit
        return self.layer(x)

gpumemnet.trace(Asks(), torch.zeros(2, 4))
assert torch._dynamo.disable.__module__.startswith("torch._dynamo")
torch.optim.SGD([nn.Parameter(torch.zeros(2))]).zero_grad()
assert torch._dynamo.is_compiling() is False
"""


def test_it_is_loaded_by_code_that_uses_it_alone() -> None:
    child = FORKS.Process(target=_run)
    child.start()
    child.join()
    assert child.exitcode == 0


def _run() -> None:
    exec(PROGRAM, {"__name__": "__main__"})
