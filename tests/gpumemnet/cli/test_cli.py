"""``gpumemnet predict``, ``models`` and ``serve`` as a person runs them: in a child process, on
real files."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from gpumemnet.job.json_codec import job_to_dict, job_to_json
from gpumemnet.predict.predictor import Predictor
from tests.jobs import small_job
from tests.parquet_jobs import write_jobs

PUBLISHED = Path(__file__).parents[3] / "gpumemnet" / "bundles" / "mlp-a100-published"
EXAMPLE = Path(__file__).parents[3] / "examples" / "mlp_job.json"


def gpumemnet(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpumemnet", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def refused(*arguments: str | Path) -> str:
    done = gpumemnet(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr


def test_one_job_for_a_person() -> None:
    done = gpumemnet("predict", EXAMPLE)
    assert done.returncode == 0, done.stderr
    for words in (
        "expected",
        "safe",
        "NVIDIA A100-SXM4-40GB",
        "1,024 – 2,048 MiB",
        "covers 0.99 of such jobs",
    ):
        assert words in done.stdout


def test_many_jobs_in_every_format_give_the_same_answers(tmp_path: Path) -> None:
    jobs = [small_job(batch_size=batch_size) for batch_size in (8, 64, 512)]
    (tmp_path / "jobs.json").write_text(json.dumps([job_to_dict(job) for job in jobs]))
    (tmp_path / "jobs.jsonl").write_text(
        "\n".join(json.dumps(job_to_dict(job)) for job in jobs) + "\n\n"
    )
    write_jobs(tmp_path / "jobs.parquet", jobs)
    answers = [
        gpumemnet("predict", tmp_path / f"jobs.{ending}", "--json").stdout
        for ending in ("json", "jsonl", "parquet")
    ]
    assert answers[0] == answers[1] == answers[2]
    lines = [json.loads(line) for line in answers[0].splitlines()]
    expected = [estimate.expected_bytes for estimate in Predictor.default().predict_many(jobs)]
    assert [line["expected_bytes"] for line in lines] == expected
    assert [line["job"] for line in lines] == [1, 2, 3]
    assert all(abs(sum(line["bins"]["probabilities"]) - 1) < 1e-4 for line in lines)
    table = gpumemnet("predict", tmp_path / "jobs.jsonl").stdout
    assert "3 jobs" in table
    assert "outside" not in table


def test_a_job_outside_the_support_says_why(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(job_to_json(small_job(optimizer="sgd")))
    done = gpumemnet("predict", tmp_path / "job.json", "--bundle", PUBLISHED)
    assert done.returncode == 0
    assert "optimizer is 'sgd'; the model was trained on 'adam'" in done.stdout
    assert "none: the job lies outside" in done.stdout


def test_gpu_and_encoder_are_chosen(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(job_to_json(small_job()))
    answers = [
        json.loads(gpumemnet("predict", tmp_path / "job.json", "--json", *options).stdout)
        for options in ((), ("--gpu", "L4"), ("--encoder", "transformer"))
    ]
    assert [answer["gpu"] for answer in answers] == [
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA L4",
        "NVIDIA A100-SXM4-40GB",
    ]
    assert [answer["model"]["name"] for answer in answers] == 2 * ["mlp-a100-published"] + [
        "mlp-a100-published-layers"
    ]
    assert [answer["label_source"] for answer in answers] == 2 * ["readings_and_traces"] + [
        "nvidia_smi_device_1s"
    ]
    for option, value, says in (
        ("--gpu", "Voodoo2", "no profile of 'Voodoo2'"),
        ("--encoder", "oracle", "encoder: must be one of mlp"),
    ):
        done = gpumemnet("predict", tmp_path / "job.json", option, value)
        assert done.returncode == 2
        assert says in done.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "no valid JSON at line 1, column 1"),
        ("", "no valid JSON at line 1, column 1"),
        ("[1]", "[0]: a job must be a JSON object, not 1"),
        ('{"family": "mlp"}', "batch_size: is missing"),
        (
            json.dumps({**job_to_dict(small_job()), "batch_size": -1}),
            "batch_size: must be between 1 and 2147483647, not -1",
        ),
        (
            job_to_json(small_job()).replace('"batch_size": 64', '"batch_size": NaN'),
            "expected value, found NaN",
        ),
        (
            job_to_json(small_job()).replace('"batch_size": 64', '"batch_size": 1e99'),
            "whole number, not 1e+99",
        ),
        (json.dumps({**job_to_dict(small_job()), "family": "rnn"}), "family: must be one of"),
    ],
)
def test_a_file_that_is_no_job_is_one_sentence(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "job.json").write_text(content)
    assert says in refused("predict", tmp_path / "job.json")


def test_a_bad_line_is_numbered(tmp_path: Path) -> None:
    good = json.dumps(job_to_dict(small_job()))
    (tmp_path / "jobs.jsonl").write_text(f"{good}\n{good}\n{good.replace('adam', 'adman')}\n")
    assert "error: line 3, optimizer: must be one of" in refused("predict", tmp_path / "jobs.jsonl")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--coverage", "1.5"], "coverage: must be between 0.5 and 0.999"),
        (["--coverage", "nan"], "coverage: must be between"),
        (["--bin-width", "-5"], "--bin-width: must be at least 1 MiB"),
        (["--bins", "gb"], "bins: must be one of published-1000mib"),
        (["--bins", "published-1000mib", "--bin-width", "5"], "not both"),
        (["--bundle", "/no/such/folder"], "/no/such/folder: no such bundle folder"),
        (["--coverage", "many"], "--coverage"),
    ],
)
def test_an_option_without_sense_is_one_sentence(options: list[str], says: str) -> None:
    assert says in refused("predict", EXAMPLE, *options)


def test_files_that_are_not_there_or_not_ours(tmp_path: Path) -> None:
    assert "nothing.json does not exist" in refused("predict", tmp_path / "nothing.json")
    assert "must end in .json" in refused("predict", tmp_path / "job.yaml")
    (tmp_path / "jobs.parquet").write_bytes(b"PAR1 but not really")
    assert "no whole Parquet file" in refused("predict", tmp_path / "jobs.parquet")


def test_models_names_the_data_and_its_licence() -> None:
    done = gpumemnet("models")
    assert done.returncode == 0
    assert "mlp-a100-published" in done.stdout
    assert "CC BY 4.0" in done.stdout
    cards = {card["name"]: card for card in json.loads(gpumemnet("models", "--json").stdout)}
    assert cards["mlp-a100-published"]["training_data"]["rows"] == 3000
    assert len(cards["mlp-a100-published"]["sha256"]) == 64
    assert cards["cnn-h200-traced"]["training_data"]["label_source"] == "traced"


def test_serve_becomes_the_service_even_beside_one_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "__main__.py").write_text("raise SystemExit('a service of the user')")
    program = str(Path(sys.executable).with_name("gpumemnet"))
    command = [program, "serve", "--port", "0", "--database-url", "off", "--workers", "2"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GPUMEMNET_")}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=clean
    ) as process:
        try:
            assert process.stderr is not None
            address = re.findall(
                r"listening on (http://\S+) with 2 workers", process.stderr.readline()
            )[0]
            with urllib.request.urlopen(f"{address}/healthz", timeout=300) as answer:
                assert answer.status == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=300) == 0
        finally:
            process.kill()  # or a failure would wait for the service for ever


def test_what_holds_a_job_and_its_largest_batch_for_a_person() -> None:
    done = gpumemnet("predict", EXAMPLE, "--fits", "--largest-batch", "A100/3g.20gb")
    assert done.returncode == 0, done.stderr
    for words in (
        "Largest batch size",
        "NVIDIA A100-SXM4-40GB, 3g.20gb, 19,904 MiB available",
        "A100/1g.5gb",
        "RTX 4090",
        "fits",
    ):
        assert words in done.stdout


def test_what_holds_a_job_and_its_largest_batch_for_a_program(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text(
        "".join(json.dumps(job_to_dict(small_job(batch_size=batch))) + "\n" for batch in (1, 64))
    )
    done = gpumemnet("predict", path, "--fits", "--largest-batch", "T4", "--json")
    documents = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(documents) == 2
    for document in documents:
        assert document["fits"][0]["gpu"] == "Tesla V100-SXM2-16GB"
        assert document["batch_sizes"]["gpu"] == "Tesla T4"
        assert document["batch_sizes"]["curve"][0]["batch_size"] == 1
    assert "need --json" in refused("predict", path, "--fits")


def test_a_largest_batch_for_a_gpu_that_there_is_not() -> None:
    assert "no profile of 'Z80'" in refused("predict", EXAMPLE, "--largest-batch", "Z80")
    assert "no MIG profile '9g.1gb'" in refused(
        "predict", EXAMPLE, "--largest-batch", "A100/9g.1gb"
    )
