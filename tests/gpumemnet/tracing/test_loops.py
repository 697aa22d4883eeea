"""Which loops of a user's code are left early, without PyTorch."""

from __future__ import annotations

import ast
import pickle
import threading
import weakref
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from gpumemnet.extract.factory import compile_file
from gpumemnet.tracing.recorder import Recorder
from gpumemnet.tracing.script import counters, loops

CODE = """
def counted():
    for i in range(100): yield i
rounds, kept = 0, []
{loop}
"""


@pytest.mark.parametrize(
    ("loop", "rounds"),
    [
        ("for i in range(100): run(); rounds += 1", 17),  # the last one, too
        ("while i < 100: run(); rounds += 1; i += 1", 18),
        # what it gathers is there, and its last round has its own number
        (
            "while i + 7 <= 700: run(); kept.append(i); i = i + 7\nrounds = len(kept) + kept[-1]",
            100 + 693,
        ),
        ("for i in counted():\n    run(); rounds += 1\n    if i > 40: break", 16),
        ("for i in range(2):\n    for k in range(100): run(); rounds += 1", 34),
        ("for i in range(100): rounds += 1", 100),  # nothing runs on the GPU
        ("for i in range(100): run(1); rounds += 1", 100),  # each round leaves a byte there
        ("for i in range(100): run(most=i); rounds += 1", 100),
        ("while len(kept) < 100: run(); rounds += 1; kept.append(i)", 100),
        # by its own condition, for what stands before its end
        (
            "while True:\n    run()\n    rounds += 1\n    if rounds >= 100: rounds += 1000; break",
            1017,
        ),
        ("rounds = sum(1 for i in counted() if not run())", 100),
        ("for i in range(100): run(); train(); rounds += 1", 100),
        ("for i in range(100):\n    rounds += 1; run(4); train()\n    if i == 50: enough()", 54),
        # of a list that is walked by its number, the largest and the last one
        (
            "data = [[0]] * 100; data[70] = [0] * 9\nwhile i < len(data):\n"
            "    x = data[i]; run(); train(); i += 1; kept.append(i)\n    if i == 5: enough()\n"
            "rounds = kept[-2:] == [71, 100] and len(kept)",
            100,
        ),
        # of epochs, one further and the last two
        (
            "for epoch in range(100):\n    rounds += 1\n    for i in range(3): run(); train()\n"
            "    if epoch == 5: enough()",
            9,
        ),
        # of clients that each make an optimizer, three like those before; few may be unlike
        (
            "for client in [*range(100)]:\n    rounds += 1; make(); run(); train()\n"
            "    if client == 5: enough()",
            7,
        ),
        (
            "for client in range(9):\n    rounds += 1; make(); run(); train()\n    if client == 5: enough()",
            9,
        ),
        # the first batch is not kept
        (
            "for i, x in enumerate(Batch() for _ in range(3)):\n"
            "    kept.append(ref(x)); rounds += kept[0]() is not None; del x",
            1,
        ),
        ("generate()\nfor i in range(100): run(1); rounds += 1", 1),
        (
            "def loop():\n    for i in range(100): run(); kept.append(i)\n"
            "thread = Thread(target=loop); thread.start(); thread.join(); rounds = len(kept)",
            100,
        ),
        # a loop within that is no longer watched does not count the rounds of this one
        (
            "for x in [1] * 3000:\n    i = 0\n    while i < 3: i += 1\n    kept.append(x); run(4); train()\n"
            "    if len(kept) == 2000: enough()\nrounds = kept.count(0)",
            0,
        ),
        # until then the script gathers, and nothing trains
        ("for i in range(100):\n    run(); rounds += 1\n    if i > 90: backward(); break", 17),
        (
            "for i in range(100):\n    run(); rounds += 1\n    if i < 90: continue\n    backward(); break",
            17,
        ),
    ],
)
def test_loops_end_that_bring_nothing_new(
    loop: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(events=0, bytes=0, most=0, steps=0, made=0, generates=False)

    def run(kept_bytes: int = 0, most: int = 0) -> None:
        gpu.events, gpu.bytes, gpu.most = gpu.events + 1, gpu.bytes + kept_bytes, most

    recorder = SimpleNamespace(
        now=lambda: gpu.events,
        levels_since=lambda start: (gpu.most, gpu.bytes),
        live_bytes=lambda: gpu.bytes,
        changes=lambda *between: [],
        keep=lambda *kept: None,
        numbers_of=lambda tensors: [],
        bytes_of=lambda numbers: 0,
    )
    monkeypatch.setattr(loops, "_SECONDS", -1)
    monkeypatch.setattr(loops, "_REST_SECONDS", -1)
    known = cast(Recorder, recorder)
    counted = counters.Counters(
        known, counters.Progress(is_inside=lambda: False, trained=lambda: (gpu.steps, gpu.made))
    )
    watched = loops.Loops(known, counted, generates=lambda: gpu.generates)
    names: dict[str, Any] = {
        "run": run,
        "train": lambda: setattr(gpu, "steps", gpu.steps + 1),
        "make": lambda: setattr(gpu, "made", gpu.made + 1),
        "enough": lambda: setattr(counted.progress, "has_trained", True),
        "generate": lambda: setattr(gpu, "generates", True),
        "backward": lambda: None,
        "Batch": type("Batch", (), {}),
        "ref": weakref.ref,
        "Thread": threading.Thread,
        "i": 0,
    }
    tree = watched.changed(ast.parse(CODE.format(loop=loop)), "train.py")
    with watched.watching():
        exec(compile(tree, "train.py", "exec"), names)
    assert names["rounds"] == rounds
    assert pickle.loads(pickle.dumps(counted.condition)) is None  # datasets hashes what code names


def test_time_goes_on_where_a_loop_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten = Mock(return_value=True)
    monkeypatch.setattr(loops, "shorten_alarm", shorten)
    recorder = cast(Recorder, SimpleNamespace(now=count().__next__))
    progress = counters.Progress(is_inside=bool, trained=lambda: (1, 1), has_trained=True)
    watched = loops.Loops(recorder, counters.Counters(recorder, progress), generates=bool)
    next(watched.rounds("train.py line 1", [1]))
    while watched.goes_on(None):
        pass
    assert [call.args[0] for call in shorten.mock_calls] == [*[10.0] * 6, 0.5]


def test_code_that_cannot_be_changed_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("rounds = 100")
    names: dict[str, Any] = {}
    exec(compile_file(tmp_path / "train.py", Mock(side_effect=SyntaxError)), names)
    assert names["rounds"] == 100
