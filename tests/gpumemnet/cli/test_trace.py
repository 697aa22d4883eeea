"""``gpumemnet trace`` as people and programs call it."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gpumemnet.cli import main
from gpumemnet.cli.trace import show_trace
from gpumemnet.job.json_codec import job_from_json
from gpumemnet.tracing.result import (
    BatchPoint,
    Peak,
    TraceAnswer,
    answer_from_dict,
    shown_mib,
)
from gpumemnet.units import GIB, MIB, ceil_mib

EXAMPLES = Path(__file__).parents[1] / "tracing" / "examples"
MODELS = Path(__file__).parents[1] / "extract" / "examples"
SMALL = [
    f"{MODELS}/small.py:sized",
    "--batch-size",
    "64",
    "--input",
    "8",
    "--arg",
    "width=3000",
    "--arg",
    "activation=ReLU",
]


def test_resnet50_is_explained(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = [
        "--batch-size",
        "32",
        "--input",
        "3x224x224",
        "--optimizer",
        "adamw",
        "--precision",
        "bf16",
        "--gpu",
        "H200",
    ]
    assert (
        main(
            ["trace", f"{MODELS}/resnet50.py:build", *options, "--out", str(tmp_path / "job.json")]
        )
        == 0
    )
    shown = capfd.readouterr()
    assert shown.err == ""
    first = shown.out.splitlines()[0]
    verdict = re.fullmatch(
        r"Fits NVIDIA H200: ([\d.]+) GiB \(([\d,]+) MiB\) expected, ([\d.]+) GiB \(([\d,]+) MiB\) safe",
        first,
    )
    assert verdict is not None
    expected_mib, safe_mib = (int(verdict[group].replace(",", "")) for group in (2, 4))
    assert 1500 < expected_mib < safe_mib < 4000
    assert abs(float(verdict[1]) - expected_mib / 1024) < 0.01
    assert "ResNet50, batch size 32, adamw, bf16, loss: cross_entropy" in shown.out
    assert _parts_shown(shown.out) == expected_mib
    assert re.search(r"peak  \w+, step \d+: aten\.\w+ in \S+", shown.out)
    job = job_from_json((tmp_path / "job.json").read_text())
    assert job.total_parameters == 25_557_032
    assert job.traced_peak_bytes is not None
    assert job.traced_peak_bytes < expected_mib * MIB


def _parts_shown(text: str) -> int:
    """The sum of the breakdown's rows, which must be the total in its last row."""
    table = text.split("memory at the peak")[1].split("expected")
    rows = [
        int(number.replace(",", ""))
        for number in re.findall(r"^ [A-Za-z ]+?\s+([\d,]+)\s+[\d.]+ %", table[0], re.MULTILINE)
    ]
    total = int(table[1].split()[0].replace(",", ""))
    assert len(rows) >= 7
    assert sum(rows) == total
    return total


def test_other_batch_sizes_and_the_largest(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *SMALL, "--gpu", "T4", "--batches", "1, 4096", "--largest-batch"]) == 0
    shown = capfd.readouterr().out
    assert re.search(r"^ 1 +\d{3} +\d{3} +fits", shown, re.MULTILINE)
    assert re.search(r"^ 4,096 +\d{3} +\d{3} +fits", shown, re.MULTILINE)
    assert re.search(r"^ Tesla T4: largest batch size that fits: \d{3},\d{3}$", shown, re.MULTILINE)


def test_programs_get_the_answer_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *SMALL, "--context-mib", "321", "--json"]) == 0
    shown = capfd.readouterr()
    assert shown.err == ""
    answer = answer_from_dict(json.loads(shown.out))
    assert answer.context_bytes == 321 * MIB
    assert "--context-mib" in answer.context_source
    assert sum(answer.parts.values()) == answer.expected_bytes
    assert answer.job is None


def test_the_allocators_settings_are_the_jobs_and_not_the_shells(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reserved(*options: str) -> int:
        assert main(["trace", *SMALL, *options, "--json"]) == 0
        return int(json.loads(capfd.readouterr().out)["reserved_bytes"])

    plain = reserved()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "large_segment_size_mb:64")
    assert reserved() == plain
    assert reserved("--allocator-conf", "large_segment_size_mb:64") > plain


@pytest.mark.parametrize(
    ("factory", "how", "sentence"),
    [
        ("operators.py:calls", "split", r"operators\.py line \d+, in split: trace_example\.split"),
        (
            "losses.py:with_loss",
            "per_sample",
            r"the loss per_sample \(.*losses\.py line \d+\) must be a scalar",
        ),
    ],
)
def test_what_cannot_be_traced_is_one_sentence_and_exit_code_2(
    factory: str, how: str, sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    name = "loss" if factory.startswith("losses") else "how"
    assert main(["trace", f"{EXAMPLES}/{factory}", "--arg", f"{name}={how}"]) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {EXAMPLES}/{factory}: ")
    assert re.search(sentence, shown.err)
    assert shown.err.count("\n") == 1


def test_a_notebook_gets_its_own_arguments(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sources = ["%%bash\nls", "%%time\n!ls", Path(f"{EXAMPLES}/scripts/plain.py").read_text()]
    cells = [{"cell_type": "code", "source": each.splitlines(keepends=True)} for each in sources]
    notebook = tmp_path / "plain.ipynb"
    notebook.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": []}, *cells]}))
    line = ["trace", str(notebook), "--gpu", "T4", "--json", "--", "--batch-size", "16"]
    assert main(line) == 0
    shown = capfd.readouterr()
    assert shown.err == ""
    answer = answer_from_dict(json.loads(shown.out))
    assert (answer.batch_size, answer.gpu) == (16, "Tesla T4")
    assert answer.parts["optimizer_state"] == 2 * answer.parts["parameter"] > 0


def test_somebody_at_a_terminal_sees_what_is_being_done() -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "gpumemnet", "trace", *SMALL]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        seen = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the other end has been closed
                break
            seen += piece
        assert process.wait() == 0
    os.close(ours)
    assert b"small.py:sized: importing torch" in seen


ANSWER = TraceAnswer(
    model="Net",
    gpu="NVIDIA A100-SXM4-40GB",
    available_bytes=40 * GIB,
    batch_size=8,
    expected_bytes=30 * GIB,
    safe_bytes=31 * GIB,
    startup_peak_bytes=30 * GIB,
    safe_basis="guesswork",
    parts={
        "parameter": 10 * GIB,
        "buffer": 0,
        "fragmentation": 19 * GIB + MIB // 2,
        "context": GIB - MIB // 2,
    },
    reserved_bytes=29 * GIB,
    allocated_bytes=29 * GIB,
    requested_bytes=28 * GIB,
    context_bytes=GIB,
    context_source="measured",
    smallest_bytes=25 * GIB,
    peak=Peak(
        7,
        "backward",
        2,
        "aten.mm",
        "a.b",
        tuple((f"blocks.{n}.attention.projection", 2 * GIB - n) for n in range(12)),
    ),
    loss="mse",
    notes=(
        "Something [bold] was settled by a rule that is long enough to be wrapped in a terminal of eighty columns, surely.",
    ),
    not_included=(
        "an evaluation loop",
        "a second batch that is on the GPU while the first is worked on, for all of the time",
    ),
    batches=(BatchPoint(batch_size=4, expected_bytes=GIB, safe_bytes=2 * GIB, verdict="yes"),),
    max_batch_size=9,
)


def shown(answer: TraceAnswer, width: int) -> str:
    file = io.StringIO()
    show_trace(answer, ("adamw", "fp32"), Console(file=file, width=width))
    return file.getvalue()


@pytest.mark.parametrize("width", [80, 130])
def test_the_report_fits_the_terminal(width: int) -> None:
    text = shown(ANSWER, width)
    assert max(map(len, text.splitlines())) <= width
    assert "buffers" not in text  # there are none
    assert "2 others" in text
    assert "Something [bold] was settled" in text


@given(st.lists(st.integers(0, 2**44), min_size=1, max_size=12))
def test_shown_mib_add_up_and_are_never_far_off(amounts: list[int]) -> None:
    shown = shown_mib(amounts)
    assert sum(shown) == ceil_mib(sum(amounts))
    assert all(abs(mib * MIB - amount) < MIB for mib, amount in zip(shown, amounts, strict=True))


def test_a_script_that_ends_too_early_is_quoted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import argparse\nprint('reads its arguments')\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--data', required=True)\nparser.parse_args()\n"
    )
    assert main(["trace", str(script)]) == 2
    said = capfd.readouterr().err
    assert f"error: {script}: the script ended before anything was on the GPU" in said
    assert said.endswith(
        "sys.exit(2); its last output was: train.py: error: the following arguments are required: --data\n"
    )


_DISTRIBUTED = """
import sys, torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from pkg.widths import WIDTH

assert __name__ == "__main__" and __package__ == "pkg.scripts"
torch.distributed.init_process_group("nccl")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH).cuda())
data = TensorDataset(torch.randn(128, WIDTH))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=int(sys.argv[1]), sampler=sampler)
assert len(loader) == 2
optimizer = torch.optim.SGD(model.parameters())
for epoch in range(2):
    sampler.set_epoch(epoch)
    for (batch,) in loader:
        model(batch.cuda()).sum().backward()
        optimizer.step()
"""


def test_a_line_that_starts_a_module_on_several_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "pkg"
    (package / "scripts").mkdir(parents=True)  # no package
    files = {
        "__init__": "import flash_attn",
        "widths": "WIDTH = 256",
        "scripts/train": _DISTRIBUTED,
    }
    for name, text in files.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                *[
                    "trace",
                    "--json",
                    "--",
                    "torchrun",
                    "--nproc-per-node",
                    "4",
                    "-m",
                    "pkg.scripts.train",
                    "16",
                ]
            ]
        )
        == 0
    )
    answer = json.loads(capfd.readouterr().out)
    assert (answer["ranks"], answer["batch_size"]) == (4, 16)
    assert answer["model"] == "pkg.scripts.train (Linear)"
    assert answer["parts"]["parameter"] == 4 * (256 * 256 + 256)
