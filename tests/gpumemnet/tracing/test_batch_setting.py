"""What sets the batch size of a script: found by name and value, and changed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from gpumemnet.errors import ExtractError
from gpumemnet.tracing.script.batch_sizes import BatchSetting, find_setting

ARGPARSE = "parser.add_argument('-b', '--batch-size', type=int, default=64)\nparser.add_argument('--test-batch-size', default=1000)"

FOLLOWED = """parser.add_argument('--bs', type=int, default=8)
parser.add_argument('--dim', type=int, default=8)
size = args.bs
loader = DataLoader(data, batch_size=size)"""


@pytest.mark.parametrize(
    ("code", "arguments", "name", "changed"),
    [
        ("", "--epochs 8 --batch-size 8", "--batch-size", "--epochs 8 --batch-size 9"),
        (
            "",
            "--per_device_train_batch_size=8 --lr=8",
            "--per_device_train_batch_size",
            "--per_device_train_batch_size=9 --lr=8",
        ),
        (
            "",
            "config/small.py --batch_size=8 --block=64",
            "--batch_size",
            "config/small.py --batch_size=9 --block=64",
        ),
        ("", "train.batch_size=8 seed=8", "train.batch_size", "train.batch_size=9 seed=8"),
        ("", "-b 8 -j 8", "-b", "-b 9 -j 8"),
        (
            "",
            "--batch-size 8 --eval-batch-size 16",
            "--batch-size",
            "--batch-size 9 --eval-batch-size 16",
        ),
        (ARGPARSE.replace("64", "8"), "--lr 1", "--batch-size", "--lr 1 --batch-size 9"),
        (FOLLOWED, "--lr 1", "--bs", "--lr 1 --bs 9"),
        (FOLLOWED, "--bs 8 --dim 8", "--bs", "--bs 9 --dim 8"),
        (ARGPARSE, "--batch-size 8", "--batch-size", "--batch-size 9"),
    ],
)
def test_the_argument_is_found_and_changed(
    code: str, arguments: str, name: str, changed: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(code)
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
    exec(setting.code(script, 9), names)
    assert names["found"] == (9, 9, 9, 9, 8, {"per_batch": 9}, 8)
    assert setting.arguments(["--epochs", "8"], 9) == ["--epochs", "8"]


def test_an_argument_may_be_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("parser.add_argument('--tokens', type=int, default=4096)")
    assert find_setting(script, [], 4, "--tokens") == BatchSetting("--tokens", 4096)
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
