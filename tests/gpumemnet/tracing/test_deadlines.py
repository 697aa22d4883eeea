"""A deadline answers with what was seen, and a launcher's variable names the line to use."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumemnet.errors import ExtractError
from gpumemnet.tracing.script.launch import trace_script

_LAYER_BYTES = 4 * (256 * 256 + 256)
_ENDLESS = """
import torch
model = torch.nn.Linear(256, 256).cuda()
while True:
    model(torch.rand(8, 256).cuda())
"""


def test_a_deadline_answers_with_what_was_seen(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_ENDLESS)
    answer = trace_script(tmp_path / "train.py", deadline_seconds=8)
    assert answer.parts["parameter"] == _LAYER_BYTES
    assert "a lower bound: the deadline was reached" in " ".join(answer.notes)


def test_a_launcher_s_variable_is_an_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; os.environ['LOCAL_RANK']")
    with pytest.raises(ExtractError, match="gpumemnet trace -- torchrun --nproc-per-node 1"):
        trace_script(tmp_path / "train.py")
