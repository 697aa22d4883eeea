"""Lists the product's files that a call passes, from a profiler.

``python docs/journeys.py [predict|trace|train …]`` prints them; with ``--write`` it puts the lists
into the page "Follow a job through the code".  A file counts when one of its functions runs during
the call; what runs while modules are imported, and before or after the call, does not count.  The
compiled modules run as plain Python, so that they are seen, too.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PACKAGES: Final = ("gpumemnet", "service", "models", "dataset_builder")
JOB: Final = ROOT / "examples/mlp_job.json"
TRACE: Final = """\
import torch
from torch import nn
import gpumemnet

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
gpumemnet.trace(model, torch.empty(8, 64))
"""
PROFILER: Final = """\
import os, sys, threading
_root = os.environ["JOURNEY_ROOT"] + os.sep
_switch, _log = os.environ["JOURNEY_SWITCH"], os.open(os.environ["JOURNEY_LOG"], os.O_WRONLY | os.O_APPEND)
_seen, _foreign = set(), set()

def _is_import(frame):
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False

def _profile(frame, event, argument):
    code = frame.f_code
    name = code.co_filename
    if event != "call" or name in _seen or name in _foreign or code.co_name == "<module>":
        return
    if not name.startswith(_root):
        _foreign.add(name)
    elif os.path.exists(_switch) and not _is_import(frame):
        _seen.add(name)
        os.write(_log, (name.removeprefix(_root) + "\\n").encode())

threading.setprofile(_profile)
sys.setprofile(_profile)
"""
"""Runs at the start of each process, as its ``sitecustomize``; a log line is a file's first call."""


class Recording:
    """A copy of the product without compiled modules, whose processes log the files they pass."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "root"
        ignored = shutil.ignore_patterns("*.so", "compiled_from.*.json", "__pycache__", "datasets")
        for name in PACKAGES:
            shutil.copytree(ROOT / name, self.root / name, ignore=ignored)
        (folder / "sitecustomize.py").write_text(PROFILER)
        self.switch, self.log = folder / "switch", folder / "log"
        self.log.touch()
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("GPUMEMNET_", "PYTHON"))}
        paths = os.pathsep.join((str(folder), str(self.root)))
        names = {"ROOT": self.root, "SWITCH": self.switch, "LOG": self.log}
        variables = {f"JOURNEY_{name}": str(path) for name, path in names.items()}
        self.environment = clean | variables | {"PYTHONPATH": paths}

    def run(self, *command: str) -> None:
        """Run a command from its start to its end with the recording on."""
        self.switch.touch()
        done = subprocess.run(
            [sys.executable, *command],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(done.stderr)

    def files(self) -> list[str]:
        """Return the files in the order of their first call."""
        return list(dict.fromkeys(self.log.read_text("utf-8").splitlines()))


def predict(recording: Recording) -> None:
    """One ``POST /v1/predict``, after another that loads what is loaded once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "gpumemnet", "serve", "--port", str(port), "--database-url", "off"]
    url = f"http://127.0.0.1:{port}"
    body = json.dumps({"job": json.loads(JOB.read_text("utf-8"))}).encode()
    asked = urllib.request.Request(  # noqa: S310 - http to this host
        f"{url}/v1/predict", body, {"Content-Type": "application/json"}
    )
    with subprocess.Popen(
        [sys.executable, *command], env=recording.environment, cwd=recording.folder
    ) as service:
        try:
            _wait_until_ready(f"{url}/readyz")
            for record in (False, True):
                if record:
                    recording.switch.touch()
                with urllib.request.urlopen(asked) as response:  # noqa: S310
                    response.read()
            recording.switch.unlink()
        finally:
            service.terminate()


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(url):  # noqa: S310
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def trace(recording: Recording) -> None:
    """``gpumemnet.trace`` of an MLP of three modules."""
    recording.run("-c", TRACE)


def train(recording: Recording) -> None:
    """``gpumemnet train`` with one pass over the published jobs."""
    dataset = ROOT / "dataset_builder/datasets/published_mlp_a100.parquet"
    out = recording.folder / "bundle"
    recording.run(
        *("-m", "gpumemnet", "train", "--dataset", str(dataset), "--epochs", "1"),
        *("--out", str(out)),
    )


JOURNEYS: Final = {"predict": predict, "trace": trace, "train": train}


def journey(name: str) -> list[str]:
    """Return the files of one journey in the order of their first call."""
    with tempfile.TemporaryDirectory(prefix="gpumemnet-journey-") as folder:
        recording = Recording(Path(folder))
        JOURNEYS[name](recording)
        return recording.files()


PAGE: Final = ROOT / "docs/concepts/follow-a-job.md"


def table(files: list[str]) -> str:
    """Return the files as a table, each with the first sentence of its docstring."""
    rows = ["| file | what it is for |", "|---|---|"]
    for file in files:
        text = ast.get_docstring(ast.parse((ROOT / file).read_text("utf-8"))) or ""
        text = re.sub(r":\w+:`~?([\w.]+)`", r"`\1`", " ".join(text.split()).replace("``", "`"))
        sentence = re.split(r"(?<=\.)\s", text)[0].rstrip(".")
        rows.append(f"| `{file}` | {sentence} |")
    return "\n".join(rows) + "\n"


def write(name: str, files: list[str]) -> None:
    """Put the table of one journey into the page."""
    mark = f"<!-- files: {name} -->\n"
    before, _, rest = PAGE.read_text("utf-8").partition(mark)
    after = re.sub(r"\A(\|.*\n)*", "", rest)
    PAGE.write_text(before + mark + table(files) + after, "utf-8")


if __name__ == "__main__":
    names = [word for word in sys.argv[1:] if word in JOURNEYS] or list(JOURNEYS)
    for name in names:
        files = journey(name)
        sys.stdout.write(f"{name}: {len(files)} files\n" + "".join(f"  {file}\n" for file in files))
        if "--write" in sys.argv:
            write(name, files)
