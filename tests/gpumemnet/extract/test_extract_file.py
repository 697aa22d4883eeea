"""From a user's file to a job, through a real child process."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gpumemnet.errors import ExtractError, InvalidRequestError
from gpumemnet.extract import Extraction, extract_file
from gpumemnet.extract.factory import factory_request
from tests.nightly import nightly


def kinds(extraction: Extraction) -> list[str]:
    return [layer.kind for layer in extraction.job.layers]


def extract(
    source: Path | str,
    *inputs: str,
    batch_size: int | None = 2,
    arguments: dict[str, Any] | None = None,
    **settings: Any,
) -> Extraction:
    return extract_file(factory_request(str(source), inputs, arguments, batch_size), **settings)


def refusal(source: Path | str, *inputs: str, **options: Any) -> str:
    with pytest.raises(ExtractError) as raised:
        extract(source, *(inputs or ("8",)), **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_gpt2_from_tokens_counts_its_tied_head_once(examples: Path) -> None:
    job = extract(f"{examples}/gpt2.py:build", "1024:int64", batch_size=4).job
    assert job.total_parameters == job.trainable_parameters == 124_439_808
    assert (job.family, job.activation_function, job.sequence_length) == (
        "transformer",
        "gelu",
        1024,
    )
    assert job.input_elements == 1024
    assert job.layers[0].parameters == 50257 * 768
    assert (job.layers[-1].kind, job.layers[-1].activations, job.layers[-1].parameters) == (
        "linear",
        1024 * 50257,
        0,
    )
    assert [layer.kind for layer in job.layers].count("attention") == 12


def test_a_model_of_seven_billion_parameters_takes_no_memory(examples: Path) -> None:
    script = (
        "import resource; from gpumemnet.extract import extract_file\n"
        "from gpumemnet.extract.factory import factory_request\n"
        f"job = extract_file(factory_request({f'{examples}/gpt2.py:build_7b'!r}, ['1024:int64'], batch_size=1)).job\n"
        "print(job.total_parameters, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    # in a process of its own, whose only child is the one that runs the factory
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    parameters, peak_kib = map(int, done.stdout.split())
    assert parameters == 6_654_210_048
    assert peak_kib < 2 * 2**20  # the weights alone would take 25 GiB


def test_the_factorys_own_inputs_are_resized_to_the_batch_size(examples: Path) -> None:
    extraction = extract(f"{examples}/small.py:mixed_batches", batch_size=8)
    assert extraction.job.batch_size == 8
    assert extraction.job.layers[0].activations == 5 * 6
    assert any("resized: input 0; kept as they are: input 1" in note for note in extraction.notes)


def test_a_users_packages_called_like_ours_are_the_ones_that_are_imported(examples: Path) -> None:
    assert extract(f"{examples}/project/train.py:build", "8").job.total_parameters == 45


def test_devices_that_are_asked_for_and_weights_that_are_loaded_are_ignored(
    examples: Path, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(8, 600), nn.BatchNorm1d(600), nn.ReLU(), nn.Linear(600, 2))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    extraction = extract(
        f"{examples}/awkward.py:on_cuda",
        arguments={"path": f"{tmp_path}/weights.pt"},
        batch_size=None,
    )
    assert kinds(extraction) == ["linear", "batch_norm1d", "relu", "linear"]
    assert extraction.job.batch_size == 4


def test_lazy_compiled_and_scripted_models_run(examples: Path) -> None:
    extraction = extract(f"{examples}/awkward.py:transformed", "8")
    assert kinds(extraction) == ["linear", "batch_norm1d", "relu", "linear", "other"]
    assert extraction.job.layers[-1].parameters == 20
    assert extraction.notes == (
        "These modules cannot be looked into; each is one layer of kind other: 2.",
    )


def test_what_the_code_prints_is_not_shown(
    examples: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert kinds(extract(f"{examples}/awkward.py:prints_and_forks", "8")) == ["linear"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("factory", "options", "sentence"),
    [
        (
            "raises",
            {},
            r"raises\(\) failed: .*broken\.py line \d+, in raises: ValueError: no such backbone: resnet51$",
        ),
        (
            "reads",
            {"arguments": {"how": "exit"}},
            r"exited the program: .*broken\.py line \d+, in forward: sys\.exit\(3\)$",
        ),
        (
            "vanishes",
            {},
            r"exit code 4 before there was an answer; its last output was: about to vanish$",
        ),
        ("crashes", {}, r"crashed the interpreter \(SIGABRT\)"),
        (
            "returns_three",
            {},
            r"must return a function as loss, and returned ''$",
        ),
        ("gives_inputs", {}, r"returns inputs itself; leave --input out$"),
        ("rases", {}, r"broken\.py has no 'rases': did you mean 'raises'\?$"),
    ],
)
def test_a_factory_that_fails_is_one_sentence_with_its_line(
    examples: Path, factory: str, options: dict[str, Any], sentence: str
) -> None:
    text = refusal(f"{examples}/broken.py:{factory}", **options)
    assert text.startswith(f"{examples}/broken.py:{factory}: ")
    with pytest.raises(ExtractError, match=sentence):
        raise ExtractError(text)


@pytest.mark.parametrize(
    ("factory", "place"),
    [
        ("hangs", r" \(it was at .*broken\.py line \d+, in hangs\)"),
        *nightly([("hangs_stubbornly", " and was stopped")]),
    ],
)
def test_a_factory_that_hangs_is_ended_at_the_deadline_and_its_line_said(
    examples: Path, factory: str, place: str
) -> None:
    for seconds in (
        4,
        16,
        64,
        256,
    ):  # a busy machine may reach the factory only within one of the later deadlines
        text = refusal(f"{examples}/broken.py:{factory}", deadline_seconds=float(seconds))
        assert f"not done after {seconds} seconds" in text
        if re.search(place, text):
            return
    raise AssertionError(text)


def test_files_that_are_missing_or_no_python_are_refused(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("x = 1\ndef build(:\n")
    assert "there is no file" in refusal(tmp_path / "none.py:build")
    assert "is no file" in refusal(f"{tmp_path}:build")
    assert "does not name a factory" in refusal(tmp_path / "wrong.py")
    assert "wrong.py line 2: SyntaxError" in refusal(tmp_path / "wrong.py:build")


def test_what_is_missing_from_the_question_is_said(examples: Path) -> None:
    source = f"{examples}/small.py:ModuleMLP"
    with pytest.raises(ExtractError, match="returns no inputs; give them"):
        extract(source)
    with pytest.raises(InvalidRequestError, match="deadline: must be above 0"):
        extract(source, "8", deadline_seconds=float("nan"))


def test_a_ready_model_will_do_and_finds_the_users_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "shapes.py").write_text("WIDTH = 3\n")
    (tmp_path / "net.py").write_text(
        "import os, sys\nfrom torch import nn\nfrom shapes import WIDTH\n"
        "assert os.environ['PYTHONPATH'] == sys.path[1], sys.path\n"
        "ready = nn.Sequential(nn.Linear(WIDTH, 1), nn.Tanh())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "library"))
    assert extract(tmp_path / "net.py:ready", "3").job.total_parameters == 4
    assert os.environ["PYTHONPATH"] == str(tmp_path / "library")
