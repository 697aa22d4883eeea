"""A trace does without Dynamo, and leaves it to those who want it."""

from __future__ import annotations

import subprocess
import sys

TRACE = """
import sys, torch
from torch import nn
import gpumemnet
gpumemnet.trace(nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.zeros(2, 4), optimizer="adamw")
"""


def test_it_is_not_loaded() -> None:
    program = TRACE + "sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_it_works_afterwards() -> None:
    program = TRACE + "\n".join(
        (
            "import torch._dynamo",
            "assert torch._dynamo.disable.__module__.startswith('torch._dynamo')",
            "torch.optim.SGD([nn.Parameter(torch.zeros(2))]).zero_grad()",
            "assert torch._dynamo.is_compiling() is False",
        )
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_model_that_uses_it_gets_it() -> None:
    program = """
import torch
from torch import nn
import gpumemnet
class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x):
        import torch._dynamo.config
        assert not torch._dynamo.is_compiling() and torch._dynamo.config.cache_size_limit
        return self.layer(x)
gpumemnet.trace(Asks(), torch.zeros(2, 4))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
