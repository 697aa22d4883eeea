"""What a traced script saves: files that other programs read, and nothing of the user's lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpumemnet.launchers.launch_line import Launch
from gpumemnet.tracing.script.start import trace_script
from tests.gpumemnet.tracing.script_child import traced

SCRIPT = Path(__file__).parent / "examples" / "scripts" / "saving.py"
CHECKPOINTS = ("last.pt", "best.pt", "handle.pt", "buffer.pt", "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a traced script; a true run has left ``last.pt`` and ``buffer.pt`` there."""
    made = tmp_path_factory.mktemp("run")
    for name in ("seen", "checkpoint-1"):
        (made / name).mkdir()
    for name in ("last.pt", "buffer.pt"):
        torch.save({"true": torch.ones(2)}, made / name)
    for name in ("results.csv", "old.log", "stale.pt", "checkpoint-1/weights"):
        (made / name).write_text("true")
    return made


@pytest.fixture(scope="module")
def answer(folder: Path) -> Any:
    return traced(SCRIPT, (str(folder),), None)


def test_files_without_values_are_read_by_other_programs(answer: Any, folder: Path) -> None:
    saved = torch.load(folder / "seen" / "last.pt", weights_only=True)
    assert saved["epoch"] == 1
    for weights in (
        saved["model"],
        torch.load(folder / "seen" / "buffer.pt", weights_only=True),
        load_file(folder / "seen" / "model.safetensors"),
    ):
        assert weights["weight"].shape == (32, 64)
        assert not weights["weight"].any()
    assert saved["optimizer"]["state"][0]["exp_avg"].shape == (32, 64)
    with torch.serialization.safe_globals([torch.nn.Linear]):
        assert torch.load(folder / "seen" / "handle.pt", weights_only=True).bias.shape == (32,)


def test_files_of_the_user_are_as_before_and_datasets_stay(answer: Any, folder: Path) -> None:
    left = {path.name for path in folder.iterdir()}
    assert left == {
        "seen",
        "data.pt",
        "processed.pt",
        "last.pt",
        "buffer.pt",
        "results.csv",
        "old.log",
        "stale.pt",
        "checkpoint-1",
        "runs",
    }
    # Another program wrote where the script did not; it could be another training.
    assert [path.name for path in (folder / "runs").rglob("*")] == ["other", "weights"]
    for name in ("results.csv", "old.log", "stale.pt", "checkpoint-1/weights"):
        assert (folder / name).read_text() == "true"
    assert torch.load(folder / "data.pt")["vocabulary"].tolist() == [0, 1, 2, 3, 4]
    assert torch.load(folder / "processed.pt")[0].tolist() == [1, 1, 1]
    for name in ("last.pt", "buffer.pt"):
        assert torch.load(folder / name)["true"].tolist() == [1, 1]


_TWO_WAYS = """
import os, torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
with open("results.csv", "a") as file:
    file.write("1")
os.rename("run", "run-1")
os.mkdir("run")
os.replace("a.pt", "b.pt")
os.remove("stale.pt")
for _ in range(3):
    model(torch.ones(8, 64).cuda()).sum().backward()
    optimizer.step()
    if model.weight.max() > 1:
        larger = torch.empty(2**22).cuda()
    torch.save(model.state_dict(), "run/last.pt")
"""


def test_each_trace_of_a_script_finds_the_files_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    files = {name: name for name in ("results.csv", "run/last.pt", "a.pt", "b.pt", "stale.pt")}
    files["train.py"] = _TWO_WAYS
    for name, text in files.items():
        Path(name).write_text(text)
    assert "both ways were traced" in " ".join(trace_script(Launch("train.py")).notes)
    assert {str(path): path.read_text() for path in Path().rglob("*.*")} == files


def test_a_trace_that_crashed_leaves_no_folder_in_the_way_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ends = "if larger and model.bias.max() > 1: os.kill(os.getpid(), 9)"
    lines = [each for each in _TWO_WAYS.splitlines() if "os.re" not in each]
    text = "\n".join(lines).replace("torch.save", f"{ends}\n    torch.save")
    Path("train.py").write_text(text.replace("for _", "larger = None\nfor _"))
    assert trace_script(Launch("train.py")).requested_bytes > 2**24


def test_what_is_saved_to_a_pipe_or_a_device_takes_no_place_of_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "train.py").write_text(
        "import torch\nmodel = torch.nn.Linear(8, 8).cuda()\n"
        f"torch.save(model.state_dict(), {str(tmp_path / 'pipe')!r})\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(2): model(torch.ones(4, 8).cuda()).sum().backward(); optimizer.step()\n"
    )
    assert traced(tmp_path / "train.py")["batch_size"] == 4
    assert (tmp_path / "pipe").is_fifo()


def test_what_was_saved_is_noted(answer: Any) -> None:
    assert answer["parts"]["saved_activation"] == 0  # nothing is copied on the GPU to be saved
    notes = " ".join(answer["notes"])
    assert "files that the script saved were removed after the trace" in notes
    assert "files that the script wrote over or added to were put back" in notes
    assert "files that the script removed were put back after the trace" in notes
    assert "torch.save wrote nothing to /nonexistent/model.pt: No such file" in notes
    assert notes.count("wrote nothing") == 1
