"""A deadline answers with what was seen, and a launcher's variable names the line to use."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from rich.console import Console

from gpumemnet.cli import main
from gpumemnet.cli.trace import LOWER_BOUND_CODE, show_trace
from gpumemnet.errors import ExtractError
from gpumemnet.launchers.launch_line import Launch
from gpumemnet.tracing.result import PhasePeak, TraceAnswer, answer_from_dict
from gpumemnet.tracing.script.branches import Assumptions, largest_answer
from gpumemnet.tracing.script.start import trace_script
from gpumemnet.units import MIB
from tests.gpumemnet.cli.test_trace import ANSWER
from tests.nightly import nightly

_LAYER_BYTES = 4 * (256 * 256 + 256)
_ENDLESS = """
import collections, torch
model = torch.nn.Linear(256, 256).cuda()
@torch.no_grad()
def evaluate(rows):
    return torch.vmap(model)(rows).sort().values
collections.deque((evaluate(torch.rand(8, 256).cuda()) for _ in iter(int, 1)), maxlen=0)
"""

_SKIPPING = """
import torch
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in iter(int, 1):
    loss = model(torch.rand(8, 256).cuda()).mean()
    try:
        if bool(loss == 0):
            continue
        loss.backward()
        optimizer.step()
    except ValueError:
        pass
"""


@pytest.mark.parametrize(("program", "seconds"), [((), "8"), *nightly([(("env",), "15")])])
def test_a_deadline_answers_with_a_lower_bound(
    program: tuple[str, ...], seconds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(_ENDLESS)
    line = [*program, "python", str(tmp_path / "train.py")]
    assert main(["trace", "--deadline", seconds, "--json", "--", *line]) == LOWER_BOUND_CODE
    document = json.loads(capsys.readouterr().out)
    assert document["is_lower_bound"]
    assert document["verdict"] == "unknown"
    assert document["parts"]["parameter"] == _LAYER_BYTES
    notes = " ".join(document["notes"])
    assert "a lower bound: the deadline was reached" in notes
    assert re.search(r"it was at \S*train.py line [78]\b", notes)
    assert document["requested_bytes"] < 2 * _LAYER_BYTES + 9 * MIB  # of a few passes
    answer = answer_from_dict(document)
    show_trace(answer, (), Console(width=200))
    text = capsys.readouterr().out
    assert text.startswith("A lower bound for NVIDIA A100-SXM4-40GB: ")
    assert " at least, " in text.splitlines()[0]
    assert "expected" not in text
    assert " safe" not in text
    assert replace(answer, available_bytes=0).verdict == "no"


@pytest.mark.nightly
def test_a_way_that_never_steps_is_not_in_the_answer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SKIPPING)
    answer = trace_script(Launch(str(tmp_path / "train.py")), deadline_seconds=20)
    assert not answer.is_lower_bound
    assert "the other way (the opposite of each) ends without a step" in " ".join(answer.notes)


@pytest.mark.parametrize(("end", "traces"), [(inf, 5), (0, 2)])
def test_single_branches_are_traced_while_there_is_time(end: float, traces: int) -> None:
    asked = []

    def trace(assumptions: Assumptions) -> TraceAnswer:
        asked.append(assumptions)
        return replace(ANSWER, branches=("a", "b", "c"))

    answer = largest_answer(trace, end)
    assert len(asked) == traces  # as usual, the opposite, and each of three alone
    assert ("a; b; c: not traced the other way alone" in " ".join(answer.notes)) is (end == 0)


@pytest.mark.parametrize("size", [1, 10**12])
@pytest.mark.parametrize("name", ["evaluation", "forward of the last batch"])  # with gradients
def test_an_evaluation_before_which_time_was_up_counts(size: int, name: str) -> None:
    def trace(assumptions: Assumptions) -> TraceAnswer:
        is_half = assumptions.selected_share == 0.5
        phases = () if is_half else (PhasePeak(name, 5, size),)
        answer = replace(ANSWER, notes=("time was up",) if is_half else (), selections=("a",))
        return replace(answer, expected_bytes=1 if is_half else 2, phases=phases)

    answer = largest_answer(trace)
    assert answer.phases[-1].name == name
    assert answer.expected_bytes == (1 if size == 1 else 2)
    assert "time was up" not in answer.notes


def test_a_launcher_s_variable_is_an_error_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os; os.environ['LOCAL_RANK']")
    with pytest.raises(ExtractError, match="gpumemnet trace -- torchrun --nproc-per-node 1"):
        trace_script(Launch(str(tmp_path / "train.py")))
