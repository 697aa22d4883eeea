"""Campaigns end to end with the real parent, fork server and journal; stand-in processes take the
place of the GPU's."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from dataset_builder.measure.journal import Journal, Settings, read_journal
from dataset_builder.planned_job import PlannedJob
from dataset_builder.recipe import load_recipe, sample_jobs
from gpumemnet.errors import DatasetError
from gpumemnet.job.dataset import write_dataset
from gpumemnet.job.measurement import Measurement
from gpumemnet.units import GIB, MIB

SMALL_RECIPES = str(Path(__file__).parents[1] / "small_recipes")
REHEARSAL = Path(__file__).with_name("rehearsal")
ROOT = Path(__file__).parents[3]
LABEL_BYTES = 464 * MIB
SEARCH_BYTES = 32 * MIB
CARD_BYTES = 5 * GIB


@cache
def _sample() -> list[PlannedJob]:
    """Drawn once for all tests."""
    return sample_jobs(load_recipe(SMALL_RECIPES + "/mlp.yaml"), 300, 0, CARD_BYTES)


class Rehearsal:
    """A campaign folder and the command that works on it."""

    def __init__(self, folder: Path, jobs: int, behaviours: list[str] | None = None) -> None:
        (folder / "held").mkdir(parents=True)
        self.folder = folder
        self.jobs = jobs
        recipe, planned = load_recipe(SMALL_RECIPES + "/mlp.yaml"), _sample()[:jobs]
        self.keys = [each.key for each in planned]
        (folder / "behaviour.json").write_text(
            json.dumps(dict(zip(self.keys, behaviours or [], strict=False)))
        )
        with Journal(folder) as journal:
            journal.keep_plan(Settings(recipe.name, recipe.digest, 0, jobs), planned)

    def start(
        self, mode: str = "process", *extra: object, limits: Callable[[], object] | None = None
    ) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            str(REHEARSAL / "rehearse.py"),
            str(self.folder),
            mode,
            str(self.jobs),
            *map(str, extra),
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "STAND_IN_FOLDER": str(self.folder)}
        return subprocess.Popen(
            command,
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=limits,
        )

    def run(
        self, mode: str = "process", *extra: object, limits: Callable[[], object] | None = None
    ) -> str:
        """Run to the end; what it wrote to standard error."""
        _, errors = self.start(mode, *extra, limits=limits).communicate(timeout=300)
        return errors

    def rows(self) -> list[Measurement]:
        return list(read_journal(self.folder))

    def finished(self) -> list[str]:
        """Keys of the finished jobs, at once: reading whole rows extracts their layers."""
        journal = self.folder / "journal.jsonl"
        lines = journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []
        keys = [json.loads(line)["key"] for line in lines]
        assert len(set(keys)) == len(keys), "a job was recorded twice"
        return keys

    def by_key(self) -> dict[str, Measurement]:
        return dict(zip(self.finished(), self.rows(), strict=True))

    def living_children(self) -> list[int]:
        return [
            int(each.name) for each in (self.folder / "held").iterdir() if _alive(int(each.name))
        ]


def _alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def _wait(condition: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def test_every_job_is_measured_once_with_its_parts_and_a_stand_in_enters_no_dataset(
    tmp_path: Path,
) -> None:
    rehearsal = Rehearsal(tmp_path / "c", 12)
    errors = rehearsal.run()
    rows = rehearsal.by_key()
    assert sorted(rows) == sorted(rehearsal.keys)
    for row in rows.values():
        assert row.status == "ok"
        assert row.label_source == "nvml_process"
        assert (row.label_bytes, row.label_state) == (LABEL_BYTES, "steady")
        assert row.steady_process_bytes == row.peak_process_bytes == LABEL_BYTES
        assert (row.context_bytes, row.peak_reserved_bytes) == (400 * MIB, 96 * MIB)
        assert row.startup_peak_bytes == LABEL_BYTES + SEARCH_BYTES
        assert [phase.name for phase in row.phases] == [
            "context",
            "build",
            "step_1",
            "step_2",
            "step_3",
        ]
        assert row.provenance == "stand_in"
    assert max(row.neighbours or 0 for row in rows.values()) >= 1, "jobs ran side by side"
    assert "12 of 12 jobs, 12 ok" in errors
    with pytest.raises(DatasetError, match="measured nothing"):
        write_dataset(tmp_path / "x.parquet", rows.values())
    assert [each.name for each in tmp_path.iterdir()] == ["c"]


def test_failures_are_recorded_with_their_reason(tmp_path: Path) -> None:
    behaviours = ["hang", "killed", "crash", "oom", "ok", "ok"]
    rehearsal = Rehearsal(tmp_path / "c", 6, behaviours)
    rehearsal.run("process", 3, 50, 1.0)
    rows = [rehearsal.by_key()[key] for key in rehearsal.keys]
    assert [row.status for row in rows] == ["timeout", "error", "error", "oom", "ok", "ok"]
    assert rows[0].reason == "killed after its deadline of 1 s"
    assert "signal 9" in str(rows[1].reason)
    assert "exit code 7" in str(rows[2].reason)
    assert rows[3].reason == "the stand-in card is full"
    for row in rows[:4]:
        assert row.label_bytes is None
        assert row.steady_process_bytes is None
        assert row.startup_peak_bytes is None
        assert row.neighbours == 0, "judged only after a run alone"


def test_a_job_that_neighbours_may_have_influenced_is_run_again_alone(tmp_path: Path) -> None:
    rehearsal = Rehearsal(
        tmp_path / "c",
        10,
        ["slow", "crowded", "retries", "slow", "slow", "slow", "crowded", "grows"],
    )
    rehearsal.run()
    rows = rehearsal.by_key()
    runs = Counter((rehearsal.folder / "runs.log").read_text().split())
    for key in (rehearsal.keys[1], rehearsal.keys[2]):
        assert runs[key] == 2
        assert rows[key].neighbours == 0
    assert {row.status for row in rows.values()} == {"ok"}
    assert [key for key, row in rows.items() if row.label_state is None] == [rehearsal.keys[7]]


@pytest.mark.parametrize(
    ("mode", "source", "side_by_side"),
    [
        ("container", "nvml_process", True),
        ("device", "nvml_device_difference", False),
    ],
)
def test_labels_come_from_readings_that_can_be_trusted(
    tmp_path: Path, mode: str, source: str, side_by_side: bool
) -> None:
    rehearsal = Rehearsal(tmp_path / "c", 5, ["slow"] * 5)
    rehearsal.run(mode)
    rows = rehearsal.rows()
    assert [(row.status, row.label_source, row.label_bytes) for row in rows] == [
        ("ok", source, LABEL_BYTES)
    ] * 5
    assert (max(row.neighbours or 0 for row in rows) > 0) == side_by_side
    assert {row.context_bytes for row in rows} == {400 * MIB}


def test_a_card_whose_readings_follow_nothing_is_refused(tmp_path: Path) -> None:
    rehearsal = Rehearsal(tmp_path / "c", 2)
    assert "can be trusted" in rehearsal.run("blind")
    assert rehearsal.rows() == []


def test_a_lost_gpu_is_one_sentence_and_loses_no_row(tmp_path: Path) -> None:
    rehearsal = Rehearsal(tmp_path / "c", 4)
    errors = rehearsal.run("lost")
    assert "was lost" in errors
    assert "Traceback" not in errors
    rehearsal.run()
    assert sorted(rehearsal.by_key()) == sorted(rehearsal.keys)


def test_a_full_disk_is_one_sentence_and_loses_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's limit on file sizes stands in for the end of the disk: the same failing
    write."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # half a file would be left
    rehearsal = Rehearsal(tmp_path / "c", 8)
    room_bytes = 12_000  # for a few rows
    errors = rehearsal.run(
        limits=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, room_bytes))
    )
    assert "cannot be written" in errors
    assert "what is finished is kept" in errors
    assert "Traceback" not in errors
    kept = set(rehearsal.by_key())
    assert 0 < len(kept) < 8
    assert not rehearsal.living_children()
    rehearsal.run()
    assert kept < set(rehearsal.by_key()) == set(rehearsal.keys)


def test_kill_nine_at_random_moments_then_resume_finishes_every_job_once(tmp_path: Path) -> None:
    rehearsal = Rehearsal(tmp_path / "c", 16, ["slow"] * 16)
    generator = random.Random(1)
    for _ in range(2):
        process = rehearsal.start()
        before = len(rehearsal.finished())
        _wait(lambda before=before: len(rehearsal.finished()) > before)
        time.sleep(generator.random() * 0.3)
        for child in generator.sample(
            rehearsal.living_children(), k=min(1, len(rehearsal.living_children()))
        ):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        finished = rehearsal.finished()
        process.kill()
        process.communicate()
        _wait(lambda: not rehearsal.living_children())
        assert set(finished) <= set(rehearsal.finished()), "a finished row was lost"
    rehearsal.run()
    assert sorted(rehearsal.finished()) == sorted(rehearsal.keys)


def test_the_time_budget_ends_a_campaign_and_the_next_goes_on(tmp_path: Path) -> None:
    rehearsal = Rehearsal(tmp_path / "c", 300, ["slow"] * 300)
    rehearsal.run("process", 2, 2.5)
    first = set(rehearsal.finished())
    assert 0 < len(first) < 300
    rehearsal.run("process", 2, 2.5)
    assert first < set(rehearsal.finished())
    assert not rehearsal.living_children()


def test_the_jobs_end_with_their_campaign_also_when_it_is_interrupted(tmp_path: Path) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        rehearsal = Rehearsal(tmp_path / number.name, 4, ["hang"] * 4)
        process = rehearsal.start()
        _wait(lambda rehearsal=rehearsal: len(rehearsal.living_children()) >= 2)
        os.killpg(process.pid, number) if number == signal.SIGINT else process.kill()
        process.communicate(timeout=60)
        _wait(lambda rehearsal=rehearsal: not rehearsal.living_children())


def test_a_fork_server_that_dies_loses_no_job(tmp_path: Path) -> None:
    rehearsal = Rehearsal(tmp_path / "c", 8, ["slow"] * 8)
    process = rehearsal.start()
    _wait(lambda: rehearsal.living_children())
    child = rehearsal.living_children()[0]
    server = int(Path(f"/proc/{child}/status").read_text().split("PPid:")[1].split()[0])
    os.kill(server, signal.SIGKILL)
    process.communicate(timeout=300)
    rehearsal.run()
    assert sorted(rehearsal.finished()) == sorted(rehearsal.keys)
