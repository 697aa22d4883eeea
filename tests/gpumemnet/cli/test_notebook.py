"""``%%memory`` over a training cell of a notebook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import gpumemnet
from gpumemnet.cli.notebook import needed_cells

CELLS = [
    "",
    "import torch\nfrom torch import nn",
    "get_ipython().run_line_magic('load_ext', 'gpumemnet')\nwidth = 512",
    "raise RuntimeError('an experiment that nothing needs')",
    "model = nn.Linear(width, width)",
    "print(model)\nget_ipython().system('nvidia-smi')",
    "model.to('cuda')",
    "optimizer = torch.optim.Adam(model.parameters())",
    "for _ in range(100):\n    loss = model(torch.ones(4, width).cuda()).sum()\n    loss.backward()\n    optimizer.step()",
    "get_ipython().run_cell_magic('memory', '', 'width = 1024')",
]
TRAINING = """
for step in range(3):
    loss = model(torch.ones(64, width, device="cuda")).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


class Notebook:
    """The part of IPython's shell that the extension uses."""

    def __init__(self, cells: list[str]) -> None:
        self.user_ns: dict[str, Any] = {"In": cells}
        self.magics: dict[tuple[str, str], Callable[[str, str], Any]] = {}

    def transform_cell(self, raw_cell: str) -> str:
        """Return the cell, which has no magics."""
        return raw_cell

    def register_magic_function(
        self, func: Callable[..., Any], magic_kind: str, magic_name: str
    ) -> None:
        """Add a magic."""
        self.magics[magic_kind, magic_name] = func


def test_the_cells_are_found_that_a_cell_needs() -> None:
    assert needed_cells(TRAINING, CELLS) == [1, 2, 4, 6, 7]
    assert needed_cells("width += 1", CELLS) == [2]
    assert needed_cells("width = 1", CELLS) == []
    assert needed_cells("no python", CELLS) == []


def test_a_training_cell_is_traced(capfd: pytest.CaptureFixture[str]) -> None:
    notebook = Notebook(CELLS)
    gpumemnet.load_ipython_extension(notebook)
    memory = notebook.magics["cell", "memory"]
    answer = memory("--gpu T4", TRAINING)
    assert answer.parts["parameter"] == 4 * (512 * 512 + 512)
    assert (answer.batch_size, answer.gpu) == (64, "Tesla T4")
    assert "<table>" in answer._repr_html_()
    assert capfd.readouterr().err == ""
    assert memory("--gpu voodoo", TRAINING) is None
    assert capfd.readouterr().err.startswith("error: --gpu: no profile of 'voodoo'")
