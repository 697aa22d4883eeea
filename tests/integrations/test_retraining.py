"""One turn of the loop by cron: with a Python that only says how it is called, and a true one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from gpumemnet.job.json_codec import job_to_dict
from tests.conftest import StartService
from tests.sites import site_rows

FOLDER = Path(__file__).parents[2] / "integrations" / "retraining"
SCRIPT = FOLDER / "retrain.sh"
STAND_IN = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$2 $3" in
  "gpumemnet observations") echo "${EXPORTED:-30} observations in site.parquet; 0 left out"; exit "${EXPORT:-0}" ;;
  "gpumemnet drift") echo "drift has spoken"; exit "${DRIFT:-10}" ;;
  "gpumemnet releases") echo "champion retrain-abc" ;;
  "gpumemnet retrain") echo "  0% reading" >&2; echo "the models have spoken"; echo "report: $PWD/runs/abc/report.json"
    while [ -e "${HOLD:-/nowhere}" ]; do sleep 0.05; done
    exit "${RETRAIN:-0}" ;;
esac
"""
EXPORT_CALL = "-m gpumemnet observations export --out site.parquet"
DRIFT_CALL = "-m gpumemnet drift site.parquet"

pytestmark = pytest.mark.skipif(
    shutil.which("flock") is None, reason="flock (util-linux) is not installed"
)


@dataclass
class Turn:
    """A machine on which nothing is installed but a stand-in of Python."""

    folder: Path
    environment: dict[str, str]

    def start(self, *arguments: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(SCRIPT), *arguments],
            cwd=self.folder,
            env=self.environment | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str, **more: str) -> tuple[int, str]:
        process = self.start(*arguments, **more)
        said, _ = process.communicate(timeout=300)
        return process.returncode, said

    @property
    def work(self) -> Path:
        return Path(self.environment["RETRAIN_FOLDER"])

    @property
    def calls(self) -> list[str]:
        calls = self.folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    @property
    def log(self) -> list[str]:
        return (self.work / "retrain.log").read_text().splitlines()


@pytest.fixture
def turn(tmp_path: Path) -> Turn:
    stand_in = tmp_path / "bin" / "python3"
    stand_in.parent.mkdir()
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    (tmp_path / "registry").mkdir()
    return Turn(
        tmp_path,
        {
            "PATH": f"{stand_in.parent}:/usr/bin:/bin",
            "CALLS": str(tmp_path / "calls"),
            "GPUMEMNET_REGISTRY": str(tmp_path / "registry"),
            "GPUMEMNET_DATABASE_URL": "sqlite:////nowhere.db",
            "RETRAIN_FOLDER": str(tmp_path / "work folder"),
        },
    )


@pytest.mark.parametrize(
    ("codes", "code", "calls", "words"),
    [
        ({}, 0, 3, r"the models have spoken \(report: .*/work folder/runs/abc/report.json\)"),
        ({"RETRAIN": "10"}, 10, 3, "drift, and the models have spoken"),
        ({"RETRAIN": "2"}, 2, 3, "retraining: something to mend"),
        ({"RETRAIN": "1"}, 1, 3, "retraining: failed with exit code 1; the champion is as it was"),
        ({"RETRAIN": "137"}, 1, 3, "retraining: failed with exit code 137"),
        ({"DRIFT": "0"}, 10, 2, "drift has spoken"),
        ({"DRIFT": "2"}, 2, 2, "drift: something to mend"),
        ({"DRIFT": "1"}, 1, 2, "drift: failed"),
        ({"EXPORT": "2"}, 2, 1, "export of the observations: something to mend"),
        ({"EXPORT": "1"}, 1, 1, "export of the observations: failed"),
        ({"EXPORTED": "0"}, 10, 1, "no observations yet"),
    ],
)
def test_every_end_has_its_code_its_line_and_its_mail(
    turn: Turn, codes: dict[str, str], code: int, calls: int, words: str
) -> None:
    found, said = turn.run(**codes)
    assert found == code, said
    assert len(turn.calls) == calls
    (line,) = turn.log
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ {code} .*", line)
    assert re.search(words, line)
    assert said.startswith("" if code == 10 else line)  # cron mails what is printed
    assert bool(said) == (code != 10)
    assert ("spoken" in said or "observations in" in said) == (code != 10)


def test_how_the_commands_are_called(turn: Turn) -> None:
    work = turn.work
    assert turn.run()[0] == 0
    assert turn.calls == [
        EXPORT_CALL,
        DRIFT_CALL,
        f"-m gpumemnet retrain --observations site.parquet --work {work}",
    ]
    more = {
        "RETRAIN_SINCE": "2026-01-31",
        "PYTHON": str(turn.folder / "bin" / "python3"),
    }
    assert turn.run("--without-promotion", "--dataset", "two words.parquet", **more)[0] == 0
    assert turn.calls[3:] == [
        f"{EXPORT_CALL} --since 2026-01-31",
        DRIFT_CALL,
        f"-m gpumemnet retrain --observations site.parquet --work {work} --without-promotion --dataset two words.parquet",
    ]
    assert len(turn.log) == 2
    assert (work / "last-turn.txt").read_text().count("the models have spoken") == 1


def test_two_turns_do_not_meet(turn: Turn) -> None:
    hold = turn.folder / "hold"
    hold.touch()
    first = turn.start(HOLD=str(hold))
    deadline = time.monotonic() + 300
    while len(turn.calls) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    code, said = turn.run()
    assert code == 1
    assert "another turn is still at work" in said
    assert len(turn.calls) == 3
    hold.unlink()
    assert (
        "the models have spoken" in first.communicate(timeout=300)[0]
    )  # its own file was left alone
    assert first.returncode == 0
    assert turn.run()[0] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"GPUMEMNET_REGISTRY": ""}, "set GPUMEMNET_REGISTRY and GPUMEMNET_DATABASE_URL"),
        ({"GPUMEMNET_DATABASE_URL": ""}, "set GPUMEMNET_REGISTRY and GPUMEMNET_DATABASE_URL"),
        ({"GPUMEMNET_REGISTRY": "/nowhere/registry"}, "there is no registry /nowhere/registry"),
        (
            {"GPUMEMNET_REGISTRY": "registry"},
            "there is no registry registry",
        ),  # the commands run in the work folder
        ({"PYTHON": "/nowhere/python"}, "/nowhere/python cannot be run"),
        ({"RETRAIN_FOLDER": "/dev/null/work"}, "/dev/null/work cannot be written to"),
    ],
)
def test_what_the_operator_can_mend_is_said_in_a_sentence(
    turn: Turn, changes: dict[str, str], words: str
) -> None:
    code, said = turn.run(**changes)
    assert code == 2
    assert words in said
    assert not turn.calls


@pytest.mark.nightly
def test_a_turn_of_the_true_commands_from_the_environment_of_cron(
    turn: Turn, start_service: StartService
) -> None:
    """Too few reports to learn from, so that it ends where the training would begin; a service has
    stored them."""
    database = f"sqlite:///{turn.folder / 'observations.db'}"
    rows = site_rows(30, shift_mib=-700)
    reports = [
        {
            "job": job_to_dict(row.job),
            "gpu": row.gpu,
            "peak_bytes": row.label_bytes,
            "source": row.label_source,
        }
        for row in rows
    ]
    with start_service(GPUMEMNET_DATABASE_URL=database) as service:
        empty = {"PYTHON": sys.executable, "GPUMEMNET_DATABASE_URL": database}
        assert turn.run(**empty) == (10, "")
        assert turn.log[-1].endswith(" 10 no observations yet")
        for observed in reports:
            stored = httpx.post(f"{service.url}/v1/observations", json=observed, timeout=300)
            assert stored.status_code == 201
    metrics = turn.folder / "drift.prom"
    code, said = turn.run("--without-committed", **empty, RETRAIN_METRICS=str(metrics))
    assert (code, said) == (10, ""), said
    assert turn.log[-1].endswith(
        " 10 drift, and 18 rows to train on are too few: 120 are needed: shipped stays champion"
    )
    assert "gpumemnet_drift_due 1" in metrics.read_text()
    (report,) = turn.work.glob("runs/*/report.json")
    assert "too few" in report.read_text()


def test_what_prometheus_reads_of_a_turn_and_its_alerts(turn: Turn) -> None:
    metrics = turn.folder / "a b.prom"
    found = {}
    for code, due in (("10", "1"), ("0", "0"), ("2", "0")):  # nothing new where nothing is known
        turn.run(DRIFT=code, RETRAIN_METRICS=str(metrics))
        found = dict(line.split() for line in metrics.read_text().splitlines())
        assert found["gpumemnet_drift_due"] == due
        assert abs(int(found["gpumemnet_drift_last_run_timestamp_seconds"]) - time.time()) < 60
    assert turn.run(RETRAIN_METRICS="/nowhere/drift.prom")[0] == 2
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        assert set(re.findall(r"gpumemnet_\w+", rule["expr"])) <= found.keys()
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] == "warning"
