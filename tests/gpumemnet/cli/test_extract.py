"""``gpumemnet extract`` as people and programs call it."""

import json
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
        "--set",
        "channels_last=true",
        "--set",
        "cudnn_benchmark=true",
    ]
    assert (
        main(
            [
                *arguments,
                *options,
                "--set",
                "gradient_accumulation=3",
                "--set",
                "optimizer_implementation=fused",
            ]
        )
        == 0
    )
    shown = capfd.readouterr()
    job = job_from_json(shown.out)
    assert job.total_parameters == 57
    assert (job.activation_function, job.family) == ("tanh", "mlp")
    assert job.channels_last
    assert job.cudnn_benchmark
    assert (job.gradient_accumulation, job.optimizer_implementation) == (3, "fused")
    assert "mlp, 3 layers, 57 parameters" in shown.err


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


def test_an_existing_file_is_kept_when_the_extraction_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "job.json"
    out.write_text("before")
    assert main(["extract", f"{tmp_path}/none.py:build", "--out", str(out)]) == 2
    assert out.read_text() == "before"
    assert capfd.readouterr().err == f"error: there is no file {tmp_path}/none.py\n"
