"""Further traces of a script go on from where it first does something that lasts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpumemnet.launchers.launch_line import Launch
from gpumemnet.tracing import trace_script
from gpumemnet.units import MIB

_SCRIPT = """
import logging, torch
from concurrent.futures import ThreadPoolExecutor
from filelock import FileLock
from random import choice
print("imported")
lines = open(__file__, buffering=4)
weight = torch.zeros(1024, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight])
assert input() == "first"
LASTING
assert input() == "second" and input() == "third", "each trace reads the same lines"
for step in range(6):
    assert next(lines).count(chr(10)), "each trace reads the file from its begin"
    loss = weight.sum()
    if loss > 1:
        torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "lasting",
    [
        "(watch := ThreadPoolExecutor(1)).submit(print)",
        "with FileLock('lock'): logging.basicConfig(filename=choice.__doc__ and 'log')",
    ],
)
def test_both_ways_of_a_branch_import_once(
    lasting: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(_SCRIPT.replace("LASTING", lasting))
    read, write = os.pipe()
    os.write(write, b"first\nsecond\nthird\n")
    os.close(write)
    before = os.dup(0)
    os.dup2(read, 0)
    answer = trace_script(Launch(str(tmp_path / "train.py")), show_output=True)
    os.dup2(before, 0)
    assert answer.requested_bytes > 64 * MIB
    assert "both ways were traced" in " ".join(answer.notes)
    assert capfd.readouterr().err.count("imported") == 1
