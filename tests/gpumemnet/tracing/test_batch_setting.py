"""What sets the batch size of a script: found by name and value, and changed."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path

import pytest

from gpumemnet.errors import ExtractError
from gpumemnet.launchers.launch_line import Launch
from gpumemnet.tracing.api import ExtraResults, TraceOptions, checked_request
from gpumemnet.tracing.script.batch_sizes import BatchSetting, find_setting
from gpumemnet.tracing.script.start import trace_script
from gpumemnet.tracing.timeline import safety
from gpumemnet.units import MIB


@pytest.mark.parametrize(
    ("arguments", "name", "changed"),
    [
        ("--epochs 8 --batch-size 8", "--batch-size", "--epochs 8 --batch-size 9"),
        (
            "--per_device_train_batch_size=8 --lr=8",
            "--per_device_train_batch_size",
            "--per_device_train_batch_size=9 --lr=8",
        ),
        (
            "config/small.py --batch_size=8 --block=64",
            "--batch_size",
            "config/small.py --batch_size=9 --block=64",
        ),
        ("train.batch_size=8 seed=8", "train.batch_size", "train.batch_size=9 seed=8"),
        ("-b 8 -j 8", "-b", "-b 9 -j 8"),
        (
            "--batch-size 8 --eval-batch-size 16",
            "--batch-size",
            "--batch-size 9 --eval-batch-size 16",
        ),
    ],
)
def test_the_argument_is_found_and_changed(
    arguments: str, name: str, changed: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    setting = find_setting(script, shlex.split(arguments), 8)
    assert setting == BatchSetting(name, 8)
    assert shlex.join(setting.arguments(shlex.split(arguments), 9)) == changed


def test_constants_with_such_a_name_are_changed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "EPOCHS, BATCH_SIZE = 8, 16\nbatch = 8\n"
        "class Settings:\n  batch_size: int = 8\ndef load(batch_size=8, *, batches=8, seed=8):\n"
        "  return batch_size, batches, seed\nfound = (batch, Settings().batch_size, *load(), dict(per_batch=8), 8)\n"
    )
    setting = find_setting(script, [], 8)
    assert setting == BatchSetting("", 8, (2, 4, 5, 7))
    names: dict[str, object] = {"__name__": "train"}
    exec(compile(setting.change(ast.parse(script.read_text()), 9), "train.py", "exec"), names)
    assert names["found"] == (9, 9, 9, 9, 8, {"per_batch": 9}, 8)
    assert setting.arguments(["--epochs", "8"], 9) == ["--epochs", "8"]


def test_an_argument_may_be_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert find_setting(script, ["--tokens", "8192"], 4, "--tokens") == BatchSetting(
        "--tokens", 8192
    )
    for arguments, name, sentence in (
        (
            ["--batch-size", "64"],
            None,
            "the model got batches of 4, and .* are: --batch-size 64",
        ),
        (
            [],
            "--samples",
            "the value of --samples is unknown: give it among the script's arguments",
        ),
    ):
        with pytest.raises(ExtractError, match=f"--batch-argument: .*{sentence}"):
            find_setting(script, arguments, 4, name)


TRAINING = """
model = torch.nn.Linear(1024, 1024).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in batches:
    optimizer.zero_grad(); model(x.cuda()).mean().backward(); optimizer.step()
with torch.no_grad():
    kept = [model(torch.randn(64 * len(x), 1024, device="cuda")) for _ in range(8)]
"""
SOURCES = {
    "argument": (
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--batch-size', type=int, default=8)\ntest_batch = 8\n"
        "batches = [torch.randn(parser.parse_args().batch_size, 1024)] * 4"
    ),
    "json": "import json\nbatches = [torch.randn(json.load(open('run.json'))['data']['micro_batch'], 1024)] * 4",
    "yaml": "import yaml\nbatches = [torch.randn(yaml.safe_load(open('run.json'))['data']['micro_batch'], 1024)] * 4",
    "dataclass": (
        "from run import Run\nfrom torch.utils.data import DataLoader\n"
        "batches = DataLoader(torch.randn(4 * 8, 1024), Run().size, drop_last=True)"
    ),
}


@pytest.mark.parametrize("source", SOURCES)
def test_batch_sizes_of_the_whole_run_are_followed_to_where_they_are_made(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(json.dumps({"data": {"micro_batch": 8, "workers": 8}}))
    Path("run.py").write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Run:\n  size: int = 8\n"
    )
    Path("train.py").write_text(f"import torch\n{SOURCES[source]}{TRAINING}")
    extras = ExtraResults(batches=(8, 16), max_batch=source == "json")
    answer = trace_script(Launch("train.py"), checked_request(TraceOptions(), extras=extras))
    notes = " ".join(answer.notes)
    assert "set by its arguments, configuration files and data loaders (8 here)" in notes
    grown = answer.batches[1].expected_bytes - answer.batches[0].expected_bytes
    # of each further sample eight outputs of the evaluation, and the input of one: 64 x 4 KiB
    assert grown / MIB == pytest.approx(8 * 9 * 64 / 256, abs=4)
    if answer.max_batch_size is not None:
        sample = grown / 8 * (1 + safety()["margins"]["others"])
        room = answer.available_bytes - (answer.batches[0].safe_bytes - 8 * sample)
        assert answer.max_batch_size == pytest.approx(room / sample, rel=0.01)
