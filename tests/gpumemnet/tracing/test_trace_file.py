"""From a user's file to its memory, through a real child process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from gpumemnet.allocator import AllocatorSettings
from gpumemnet.errors import ExtractError, InvalidJobError, InvalidRequestError
from gpumemnet.extract.factory import factory_request
from gpumemnet.gpu import available_mib, device_profile
from gpumemnet.tracing import ExtraResults, TraceAnswer, trace_file
from gpumemnet.tracing.api import TraceOptions, checked_request
from gpumemnet.units import GIB, MIB

OPTION_NAMES = {field.name for field in fields(TraceOptions)}
EXAMPLES = Path(__file__).parent / "examples"
MODELS = Path(__file__).parents[1] / "extract" / "examples"


def traced(source: str, *inputs: str, **options: Any) -> TraceAnswer:
    given, of_factory, limits = (
        {name: options.pop(name) for name in names & options.keys()}
        for names in (OPTION_NAMES, {"arguments", "batch_size"}, {"deadline_seconds", "progress"})
    )
    factory = factory_request(source, inputs, **of_factory)
    return trace_file(factory, checked_request(TraceOptions(**given), **options), **limits)


def refusal(source: str, *inputs: str, **options: Any) -> str:
    with pytest.raises(ExtractError) as raised:
        traced(source, *inputs, **options)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"{source}: ")
    return str(raised.value)


@pytest.mark.nightly
def test_a_model_of_seven_billion_parameters_takes_little_of_the_host() -> None:
    model = [f"{MODELS}/gpt2.py:build_7b", "--input", "1024:int64", "--batch-size", "1"]
    command = [
        sys.executable,
        "-m",
        "gpumemnet",
        "trace",
        *model,
        "--precision",
        "bf16",
        "--gpu",
        "H200",
        "--json",
    ]
    script = (
        "import resource, subprocess, sys\n"
        f"done = subprocess.run({command!r}, stdout=subprocess.PIPE, check=True)\n"
        "sys.stdout.buffer.write(done.stdout)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)"
    )
    # in a process of its own, so that no other child of the tests counts
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    parts = json.loads(done.stdout)["parts"]
    assert parts["parameter"] == 2 * 6_654_210_048
    assert parts["optimizer_state"] >= 4 * 6_654_210_048
    assert int(done.stderr.split()[-1]) < 4 * 2**20  # KiB


def test_everything_that_can_be_asked_comes_back() -> None:
    steps: list[str] = []
    gpu = replace(device_profile("A10"), context_bytes=300 * MIB, context_source="said so")
    answer = traced(
        f"{MODELS}/small.py:sized",
        "8",
        arguments={"width": 2048, "activation": "Tanh"},
        batch_size=64,
        gpu=gpu,
        allocator=AllocatorSettings(expandable_segments=True, roundup_power2_divisions=(4,) * 16),
        extras=ExtraResults(batches=(32, 128), curve=True, job=True),
        progress=steps.append,
        optimizer="sgd",
        loss="mse",
        gradient_accumulation=2,
    )
    assert (answer.gpu, answer.context_bytes, answer.available_bytes) == (
        gpu.name,
        300 * MIB,
        available_mib(gpu) * MIB,
    )
    assert answer.parts["parameter"] == 4 * (8 * 2048 + 2048 + 2 * 2048 + 2)
    assert answer.parts["optimizer_state"] == 0
    assert answer.loss == "mse"
    assert [point.batch_size for point in answer.batches] == [32, 128]
    assert answer.curve is not None
    assert answer.job is not None
    assert answer.job["gradient_accumulation"] == 2
    assert steps[-1].startswith("tracing ")


def test_a_factory_may_bring_its_loss() -> None:
    assert traced(f"{EXAMPLES}/losses.py:with_loss", arguments={"loss": "margin"}).loss == "margin"
    assert refusal(f"{EXAMPLES}/losses.py:with_loss", arguments={"loss": "text"}).endswith(
        "as loss, and returned 'mse'"
    )


def test_values_that_the_factory_reads_are_guessed_too() -> None:
    source = f"{EXAMPLES}/values.py:normalised"
    notes = traced(source).notes
    assert len(notes) == 3
    assert "in normalised, was taken to be 1" in notes[0]
    assert "copies a tensor to the host" in notes[-1]


@pytest.mark.parametrize(
    ("factory", "options", "sentence"),
    [
        (
            "factories.py:raises",
            {},
            r"raises\(\) failed: .*factories\.py line \d+, in raises: FileNotFoundError: no such checkpoint",
        ),
        (
            "factories.py:leaves",
            {"arguments": {"how": "exit"}},
            r"exited the program: .*line \d+, in backward: sys\.exit\('enough'\)$",
        ),
        (
            "factories.py:mismatched",
            {},
            r"fails: .*factories\.py line \d+, in forward: RuntimeError.*; inputs: 4x8, 6x8$",
        ),
    ],
)
def test_what_goes_wrong_is_one_sentence_with_its_line(
    factory: str, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ExtractError, match=sentence):
        raise ExtractError(refusal(f"{EXAMPLES}/{factory}", **options))


@pytest.mark.nightly
def test_a_model_that_hangs_is_ended_at_the_deadline_and_its_line_said() -> None:
    for seconds in (
        5,
        20,
        80,
        300,
    ):  # a busy machine may reach the backward pass only within one of the later deadlines
        text = refusal(
            f"{EXAMPLES}/factories.py:leaves",
            arguments={"how": "never"},
            deadline_seconds=float(seconds),
        )
        assert f"not done after {seconds} seconds" in text
        assert text.endswith(": raise --deadline")
        if re.search(r"\(it was at .*factories\.py line \d+, in backward\)", text):
            return
    raise AssertionError(text)


def test_a_file_that_is_no_python_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("x = 1\ndef build(:\n")
    assert "wrong.py line 2: SyntaxError" in refusal(
        f"{tmp_path}/wrong.py:build", "8", batch_size=2
    )


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"loss": "hinge"}, InvalidRequestError, "loss: must be one of auto, "),
        ({"zero_grad": "never"}, InvalidRequestError, "zero_grad: must be one of before_forward, "),
        ({"gpu": "Voodoo 2"}, InvalidRequestError, "gpu: no profile of 'Voodoo 2'"),
        ({"gpu": "none.json"}, InvalidRequestError, "gpu: none.json cannot be read"),
        (
            {"extras": ExtraResults(batches=(0,))},
            InvalidJobError,
            "batches: must be between 1 and 2147483647, not 0",
        ),
        ({"deadline_seconds": 0.0}, InvalidRequestError, "deadline: must be above 0"),
        ({"precision": "fp8"}, InvalidJobError, "precision: must be one of "),
        ({"batch_size": 0}, InvalidJobError, "batch_size: must be between 1 and "),
    ],
)
def test_questions_that_cannot_be_asked(
    options: dict[str, object], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        traced(f"{MODELS}/small.py:ModuleMLP", "8", **{"batch_size": 2, **options})


def test_the_capacity_of_a_profile_decides(tmp_path: Path) -> None:
    tiny = replace(device_profile("T4"), capacity_bytes=GIB // 2)
    answer = traced(
        f"{MODELS}/small.py:ModuleMLP",
        "8",
        batch_size=2,
        gpu=tiny,
        extras=ExtraResults(max_batch=True),
    )
    assert not answer.fits
    assert answer.max_batch_size == 0
