"""Bundles spoilt with their checksums made right again: refused in one sentence, or answering in
numbers; never anything else.

Each is tried in a child process, as a spoilt graph could take down the process that runs it, and a
crash fails the test too.
"""

import hashlib
import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from gpumemnet.predict.bundle import CARD_FILE, MODEL_FILE, SUMS_FILE, shipped_bundles
from tests.fuzzing import fuzzed, spoilt_bytes, spoilt_json

PATIENCE_SECONDS = 300
BUNDLES = {bundle.card.encoder: bundle for bundle in shipped_bundles()}
"""The last of each encoder."""
FOLDERS = [Path(bundle.source) for bundle in BUNDLES.values()]
ENDS_BYTES = 6000
"""A graph's nodes stand at its beginning, its inputs and outputs at its end, and the weights, most
of the file, between."""

FINE = {"works", "refused"}


class Files(dict[str, bytes]):
    """The files of a bundle by name; a failing example is told by their sizes, as hypothesis cannot
    print half a megabyte."""

    def __repr__(self) -> str:
        return f"Files({ {name: len(content) for name, content in self.items()} })"


class Trial:
    """A child process that tries bundles; another takes its place when it dies."""

    def __init__(self) -> None:
        self._child = self._started()

    def come_to(self, files: Files) -> tuple[str, str]:
        """What came of a bundle of these files, and details."""
        with tempfile.TemporaryDirectory() as folder:
            for name, content in files.items():
                Path(folder, name).write_bytes(content)
            assert self._child.stdin is not None
            assert self._child.stdout is not None
            self._child.stdin.write(f"{folder}\n")
            self._child.stdin.flush()
            is_there, _, _ = select.select([self._child.stdout], [], [], PATIENCE_SECONDS)
            line = self._child.stdout.readline() if is_there else ""
        if not line:
            self.close()
            code = self._child.returncode
            self._child = self._started()
            return f"crashed with {code}" if is_there else "hangs", ""
        answer = json.loads(line)
        return answer["came_to"], answer["detail"]

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()

    def _started(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "tests.service.bundle_trial"]
        root = Path(__file__).parents[2]
        return subprocess.Popen(
            command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )


@pytest.fixture(scope="module")
def trial() -> Iterator[Trial]:
    trial = Trial()
    yield trial
    trial.close()


def sums(files: Files) -> bytes:
    return "".join(
        f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in (MODEL_FILE, CARD_FILE)
    ).encode()


def contents(folder: Path) -> Files:
    return Files(
        {name: (folder / name).read_bytes() for name in (MODEL_FILE, CARD_FILE, SUMS_FILE)}
    )


@st.composite
def spoilt_graphs(draw: st.DrawFn) -> Files:
    files = contents(draw(st.sampled_from(FOLDERS)))
    graph = files[MODEL_FILE]
    where = draw(st.sampled_from(["nodes", "nodes", "ends", "weights", "cut", "exchanged"]))
    if where == "nodes":
        graph = draw(spoilt_bytes(graph[:ENDS_BYTES])) + graph[ENDS_BYTES:]
    elif where == "ends":
        graph = graph[:-1000] + draw(spoilt_bytes(graph[-1000:]))
    elif where == "weights":
        at = draw(st.integers(ENDS_BYTES, len(graph) - 1000))
        piece = draw(
            st.sampled_from(
                [
                    b"\x00\x00\xc0\x7f",
                    b"\x00\x00\x80\xff",
                    b"\xff" * 400,
                    b"\x7f" * 400,
                    b"\x00" * 4000,
                ]
            )
        )
        graph = graph[:at] + piece + graph[at + len(piece) :]
    elif where == "cut":
        graph = graph[: draw(st.integers(0, len(graph)))]
    else:
        graph = (draw(st.sampled_from(FOLDERS)) / MODEL_FILE).read_bytes()
    files[MODEL_FILE] = graph
    files[SUMS_FILE] = sums(files)
    return files


@st.composite
def spoilt_cards(draw: st.DrawFn) -> Files:
    files = contents(draw(st.sampled_from(FOLDERS)))
    files[CARD_FILE] = draw(spoilt_json([json.loads(files[CARD_FILE])]))
    files[SUMS_FILE] = sums(files)
    return files


@st.composite
def spoilt_sums(draw: st.DrawFn) -> Files:
    files = contents(draw(st.sampled_from(FOLDERS)))
    name = draw(st.sampled_from([SUMS_FILE, SUMS_FILE, MODEL_FILE, CARD_FILE]))
    files[name] = draw(spoilt_bytes(files[name]))
    return files


@pytest.mark.parametrize("spoilt", [spoilt_graphs, spoilt_cards, spoilt_sums])
def test_spoilt_bundles(trial: Trial, spoilt: Callable[[], st.SearchStrategy[Files]]) -> None:
    @fuzzed
    @given(files=spoilt())
    def load(files: Files) -> None:
        came_to, detail = trial.come_to(files)
        event(came_to)
        assert came_to in FINE, detail
        assert "\n" not in detail

    load()
