"""``gpumemnet extract`` as people and programs call it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpumemnet.cli import main
from gpumemnet.job.json_codec import job_from_json

EXAMPLES = Path(__file__).parents[1] / "extract" / "examples"


def test_resnet50_is_written_whole_and_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "job.json"
    source = f"{EXAMPLES}/resnet50.py:build"
    options = [
        "--batch-size",
        "32",
        "--input",
        "3x224x224",
        "--optimizer",
        "adamw",
        "--precision",
        "fp32",
        "--out",
        str(out),
    ]
    assert main(["extract", source, *options]) == 0
    job = job_from_json(out.read_text())
    assert job.total_parameters == 25_557_032
    assert (job.family, job.batch_size, job.input_elements) == ("cnn", 32, 150_528)
    assert (job.optimizer, job.precision, job.activation_function) == ("adamw", "fp32", "relu")
    kinds = [layer.kind for layer in job.layers]
    assert (
        kinds.count("conv2d"),
        kinds.count("batch_norm2d"),
        kinds.count("relu"),
        kinds.count("add"),
    ) == (53, 53, 49, 16)
    assert [path.name for path in tmp_path.iterdir()] == ["job.json"]
    shown = capfd.readouterr()
    assert "25,557,032" in shown.out
    assert "note: 65 layer(s) overwrite their input" in shown.out
    assert shown.err == ""


def test_without_a_file_the_job_goes_to_standard_output_and_the_table_does_not(
    capfd: pytest.CaptureFixture[str],
) -> None:
    arguments = ["extract", f"{EXAMPLES}/small.py:sized", "--batch-size", "2", "--input", "8"]
    options = [
        "--arg",
        "width=5",
        "--arg",
        "activation=Tanh",
        "--channels-last",
        "--cudnn-benchmark",
        "--family",
        "cnn",
    ]
    assert (
        main(
            [
                *arguments,
                *options,
                "--gradient-accumulation",
                "3",
                "--optimizer-implementation",
                "fused",
            ]
        )
        == 0
    )
    shown = capfd.readouterr()
    job = job_from_json(shown.out)
    assert job.total_parameters == 57
    assert (job.activation_function, job.family) == ("tanh", "cnn")
    assert job.channels_last
    assert job.cudnn_benchmark
    assert (job.gradient_accumulation, job.optimizer_implementation) == (3, "fused")
    assert "Largest of 3 layers" in shown.err


def test_programs_get_one_document_even_from_a_factory_that_prints(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            [
                "extract",
                f"{EXAMPLES}/awkward.py:prints_and_forks",
                "--batch-size",
                "2",
                "--input",
                "8",
                "--json",
            ]
        )
        == 0
    )
    shown = capfd.readouterr()
    document = json.loads(shown.out)
    assert document["layer_names"] == [""]
    assert document["notes"] == []
    assert document["job"]["total_parameters"] == 36
    assert shown.err == ""


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--optimizer", "lion"], "error: --optimizer: must be one of sgd, "),
        (["--precision", "fp8"], "error: --precision: must be one of "),
        (["--batch-size", "0"], "error: --batch-size: must be between 1 and "),
        (["--input", "3,4"], "error: --input: must look like 3x224x224"),
        (["--arg", "width"], "error: --arg: must look like depth=12"),
        (["--arg", "width=1", "--arg", "width=2"], "error: --arg: 'width' is given twice"),
        (
            ["--out", "/no/such/folder/job.json"],
            "error: --out: the folder /no/such/folder does not exist",
        ),
        (["--deadline", "-1"], "error: --deadline: must be above 0"),
        (["--family", "gan"], "error: --family: must be one of "),
    ],
)
def test_wrong_options_are_one_sentence_and_exit_code_2(
    options: list[str], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["extract", f"{EXAMPLES}/small.py:sized", "--batch-size", "2", *options]) == 2
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(sentence)
    assert shown.err.count("\n") == 1


def test_an_existing_file_is_kept_when_the_extraction_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "job.json"
    out.write_text("before")
    assert main(["extract", f"{tmp_path}/none.py:build", "--out", str(out)]) == 2
    assert out.read_text() == "before"
    assert capfd.readouterr().err == f"error: there is no file {tmp_path}/none.py\n"


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["extract"], ["extract", "a.py:b", "--batch-size", "many"]]
)
def test_usage_errors_exit_with_2(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert "--help" in said


def test_help_names_the_commands_and_loads_no_torch() -> None:
    code = (
        "import sys\nfrom gpumemnet.cli import main\nassert main(['--help']) == 0\n"
        "assert not {'torch', 'onnxruntime', 'pandas'} & set(sys.modules), sorted(sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "extract" in shown.stdout


def test_the_module_runs_as_the_command_and_knows_its_version() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "gpumemnet", "--version"], check=True, capture_output=True, text=True
    )
    assert re.fullmatch(r"gpumemnet \d+\.\d+\.\d+, compiled modules: (yes|no)\n", shown.stdout)


def test_ctrl_c_ends_the_child_too_and_exits_with_130(tmp_path: Path) -> None:
    mark = tmp_path / "child.pid"
    (tmp_path / "slow.py").write_text(
        f"import os, time\nopen({str(mark)!r} + '.part', 'w').write(str(os.getpid()))\n"
        f"os.rename({str(mark)!r} + '.part', {str(mark)!r})\nwhile True: time.sleep(1)\n"
    )
    command = [
        sys.executable,
        "-m",
        "gpumemnet",
        "extract",
        f"{tmp_path}/slow.py:build",
        "--batch-size",
        "1",
        "--input",
        "8",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        while not mark.exists():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr is not None
        assert process.stderr.read() == b"interrupted\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
