"""Programs and processes that a script starts run on the simulated GPU, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumemnet.errors import ExtractError
from gpumemnet.launchers.launch_line import Launch
from gpumemnet.tracing.script.start import trace_script

_TRAINING = """
import sys, torch
def train(width=1024, model=None):
    model = model or torch.nn.Linear(width, width).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.rand(64, width).cuda()).sum().backward()
        optimizer.step()
if __name__ == "__main__":
    train(*map(int, sys.argv[1:]))
"""
_STARTS = {
    "program": "import subprocess, sys\nsubprocess.run(['srun', '-n1', sys.executable, 'train.py'], check=True)\n",
    "programs": (
        "import os, subprocess, sys\n"
        "for width in (512, 1024, 256):\n"
        "    subprocess.run([sys.executable, 'train.py', str(width)], check=True)\n"
    ),
    "killed": (  # as a worker that waits for its next task
        "import subprocess, sys\nopen('train.py', 'a').write('    import os; os.kill(os.getpid(), 9)')\n"
        "subprocess.run([sys.executable, 'train.py'], check=True)\n"
    ),
    "shared": (
        "import multiprocessing, torch\nfrom train import train\nmodel = torch.nn.Linear(1024, 1024).cuda()\n"
        "for _ in range(2): multiprocessing.Process(target=train, args=(1024, model)).start()\n"
    ),
    "process": (
        "import multiprocessing, shlex\nfrom train import train\n"
        "if __name__ == '__main__':\n"
        "    multiprocessing.get_context('spawn').Process(target=shlex.quote, args=('',)).start()\n"
        "    multiprocessing.Process(target=train).start()\n"
    ),
}


@pytest.mark.parametrize("start", _STARTS)
def test_the_largest_child_that_trains_is_answered_for(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(_TRAINING)
    Path("main.py").write_text(_STARTS[start])
    answer = trace_script(Launch("main.py"))
    parameter_bytes = 4 * (1024 * 1024 + 1024)
    assert answer.parts["parameter"] == parameter_bytes
    assert answer.parts["gradient"] == parameter_bytes
    assert answer.parts["optimizer_state"] == pytest.approx(2 * parameter_bytes, abs=1024)
    assert answer.notes[0].count("MiB") == {"programs": 2, "shared": 1}.get(start, 0)  # of others


@pytest.mark.parametrize(
    ("start", "text", "sentence"),
    [
        ("process", "def train(): raise ValueError('no images')", "no images"),
        ("program", _TRAINING.replace(".cuda()", "").replace("3", "10"), "never left the CPU: 10 "),
    ],
)
def test_what_a_process_lacks_is_told(
    start: str, text: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(text)
    Path("main.py").write_text(_STARTS[start])
    with pytest.raises(ExtractError, match=rf"a process that it started: .*{sentence}"):
        trace_script(Launch("main.py"))
