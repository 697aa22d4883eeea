"""``gpumemnet predict``, ``models`` and ``serve`` as a person runs them."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from gpumemnet.cli import main
from gpumemnet.job.json_codec import job_to_dict, job_to_json
from gpumemnet.predict.predictor import Predictor
from tests.jobs import small_job
from tests.parquet_jobs import write_jobs

ROOT = Path(__file__).parents[3]
PUBLISHED = ROOT / "gpumemnet" / "bundles" / "mlp"
EXAMPLE = ROOT / "examples" / "mlp_job.json"


Printed = Callable[..., str]


@pytest.fixture
def printed(capfd: pytest.CaptureFixture[str]) -> Printed:
    """Runs a command line that must succeed; returns what it prints."""

    def run(*arguments: str | Path) -> str:
        assert main(list(map(str, arguments))) == 0
        return capfd.readouterr().out

    return run


def test_one_job_for_a_person(printed: Printed) -> None:
    shown = printed("predict", EXAMPLE)
    for words in ("expected", "NVIDIA A100-SXM4-40GB", "1,024 – 2,048 MiB", "covers 0.99 of such"):
        assert words in shown


def test_many_jobs_in_every_format_give_the_same_predictions(
    printed: Printed, tmp_path: Path
) -> None:
    jobs = [small_job(batch_size=batch_size) for batch_size in (8, 64, 512)]
    documents = [job_to_dict(job) for job in jobs]
    (tmp_path / "jobs.json").write_text(json.dumps(documents))
    (tmp_path / "jobs.jsonl").write_text("\n".join(map(json.dumps, documents)) + "\n\n")
    write_jobs(tmp_path / "jobs.parquet", jobs)
    texts = [
        printed("predict", tmp_path / f"jobs.{ending}", "--json")
        for ending in ("json", "jsonl", "parquet")
    ]
    assert texts[0] == texts[1] == texts[2]
    lines = [json.loads(line) for line in texts[0].splitlines()]
    expected = [one.expected_bytes for one in Predictor.default().predict_many(jobs)]
    assert [line["expected_bytes"] for line in lines] == expected
    assert [line["job"] for line in lines] == [1, 2, 3]
    table = printed("predict", tmp_path / "jobs.jsonl")
    assert "3 jobs" in table
    assert "no limit" not in table


def test_a_job_unlike_the_training_data_says_why(printed: Printed, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(job_to_json(small_job(gradient_accumulation=64)))
    shown = printed("predict", tmp_path / "job.json", "--bundle", PUBLISHED)
    assert "gradient_accumulation is 64; the model was trained on 1 to 4" in shown
    assert "none: the job is unlike the training data" in shown


def test_a_bad_line_is_numbered(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good = json.dumps(job_to_dict(small_job()))
    (tmp_path / "jobs.jsonl").write_text(f"{good}\n{good}\n{good.replace('adam', 'adman')}\n")
    assert main(["predict", str(tmp_path / "jobs.jsonl")]) == 2
    assert "error: line 3, optimizer: must be one of" in capfd.readouterr().err


def test_what_holds_a_job(
    printed: Printed, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shown = printed("predict", EXAMPLE, "--fits")
    for words in ("19,904", "A100/1g.5gb", "RTX 4090"):
        assert words in shown
    path = tmp_path / "jobs.jsonl"
    jobs = [small_job(batch_size=batch) for batch in (1, 64)]
    path.write_text("".join(json.dumps(job_to_dict(job)) + "\n" for job in jobs))
    text = printed("predict", path, "--fits", "--json")
    for document in map(json.loads, text.splitlines()):
        assert document["fits"][0]["gpu"] == "Tesla V100-SXM2-16GB"
    assert main(["predict", str(path), "--fits"]) == 2
    assert "needs --json" in capfd.readouterr().err


def test_serve_is_the_service_even_beside_one_of_the_same_name(tmp_path: Path) -> None:
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
            listening = r"listening on (http://\S+) "
            address = re.findall(listening, process.stderr.readline())[0]
            with urllib.request.urlopen(f"{address}/healthz", timeout=300) as response:
                assert response.status == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=300) == 0
        finally:
            process.kill()  # or a failure would wait for the service for ever
