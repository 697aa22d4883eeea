"""Batches that are killed, disturbed or run out of room: what is finished stays, and the answers
are the same to the byte."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gpumemnet.batch.part_predictions import BatchOptions
from gpumemnet.batch.run import predict_files
from gpumemnet.job.table_reader import CHUNK_ROWS
from tests.gpumemnet.batch.batch_files import COMMAND, refused, run, totals, write
from tests.nightly import nightly

ROWS = 45_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A file of twelve parts, and its answers from one process."""
    folder = tmp_path_factory.mktemp("whole")
    jobs = write(folder / "jobs.parquet", totals(ROWS), row_group_size=25_000)
    predict_files([str(jobs)], str(folder / "out.parquet"), BatchOptions(), workers=1)
    return jobs, (folder / "out.parquet").read_bytes()


def start(jobs: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, str(jobs), "--out", str(out), *options],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished(out: Path) -> list[Path]:
    """The files of the parts that are finished."""
    return [
        path.with_name(path.name.replace(".counts.json", out.suffix))
        for path in out.parent.glob(f".{out.name}.parts-*/*.counts.json")
    ]


def wait_for_parts(process: subprocess.Popen[str], out: Path, count: int) -> None:
    deadline = time.monotonic() + 300
    while len(finished(out)) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_killed_run_goes_on_and_ends_the_same(tmp_path: Path, whole: tuple[Path, bytes]) -> None:
    jobs, expected = whole
    out = tmp_path / "out.parquet"
    process = start(jobs, out, "--workers", "2")
    wait_for_parts(process, out, 3)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert process.stderr is not None
    process.stderr.close()
    assert not out.exists()
    kept = {path: path.stat().st_mtime_ns for path in finished(out)}
    assert len(kept) >= 3
    folder = next(iter(kept)).parent
    (folder / ".staging-77").write_bytes(b"half of a part")
    deadline = time.monotonic() + 300  # its workers notice that their parent has died, and end
    while _is_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    begun = time.time_ns()
    again = run(jobs, "--out", out, "--workers", "2")
    assert again.returncode == 0, again.stderr
    assert all(moment < begun for moment in kept.values())
    assert out.read_bytes() == expected
    assert list(tmp_path.iterdir()) == [out]


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_finished_parts_are_not_answered_again(tmp_path: Path, whole: tuple[Path, bytes]) -> None:
    jobs, expected = whole
    out = tmp_path / "out.parquet"
    process = start(jobs, out, "--workers", "1")
    wait_for_parts(process, out, 5)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode in (130, 1), said
    assert "Traceback" not in said
    kept = len(finished(out))
    outcome = predict_files([str(jobs)], str(out), BatchOptions(), workers=1)
    assert outcome.tally.rows == ROWS
    assert outcome.rate * outcome.seconds == pytest.approx(ROWS - kept * CHUNK_ROWS, abs=CHUNK_ROWS)
    assert out.read_bytes() == expected


def test_other_options_and_other_files_begin_anew(
    tmp_path: Path, whole: tuple[Path, bytes]
) -> None:
    jobs, expected = whole
    out = tmp_path / "out.parquet"
    process = start(jobs, out, "--workers", "1", "--coverage", "0.9")
    wait_for_parts(process, out, 1)
    process.kill()
    process.communicate()
    (other,) = tmp_path.glob(".out.parquet.parts-*")
    predict_files([str(jobs)], str(out), BatchOptions(), workers=1)
    assert not other.exists()
    assert out.read_bytes() == expected


def test_a_worker_that_is_killed_is_one_sentence(tmp_path: Path, whole: tuple[Path, bytes]) -> None:
    jobs, expected = whole
    out = tmp_path / "out.parquet"
    process = start(jobs, out, "--workers", "2")
    wait_for_parts(process, out, 1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    workers = [
        one for one in children if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()
    ]
    os.kill(int(workers[0]), signal.SIGKILL)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "a worker process ended before its time" in said
    assert "Traceback" not in said
    assert run(jobs, "--out", out).returncode == 0
    assert out.read_bytes() == expected


def test_two_runs_do_not_write_one_file(tmp_path: Path, whole: tuple[Path, bytes]) -> None:
    jobs, _ = whole
    out = tmp_path / "out.parquet"
    process = start(jobs, out, "--workers", "1")
    try:
        wait_for_parts(process, out, 1)
        process.send_signal(signal.SIGSTOP)  # or it may be done before the other begins
        assert "another run is writing out.parquet" in refused(jobs, "--out", out)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("workers", [*nightly(["1"]), "2"])
def test_a_full_disk_is_one_sentence(
    tmp_path: Path, whole: tuple[Path, bytes], workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # half a file would be left
    jobs, expected = whole
    out = tmp_path / "out.parquet"
    out.write_bytes(b"the answers of last week")

    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    done = run(jobs, "--out", out, "--workers", workers, preexec_fn=little_room)
    assert done.returncode == 2, done.stderr
    assert "cannot be written (File too large)" in done.stderr
    assert "the same command, run again, goes on" in done.stderr
    assert "Traceback" not in done.stderr
    assert out.read_bytes() == b"the answers of last week"
    predict_files([str(jobs)], str(out), BatchOptions(), workers=1)
    assert out.read_bytes() == expected


def test_how_the_work_is_shared_leaves_no_trace(tmp_path: Path, whole: tuple[Path, bytes]) -> None:
    jobs, expected = whole
    write(tmp_path / "jobs.parquet", pq.read_table(jobs), row_group_size=7000)
    assert (
        run(
            tmp_path / "jobs.parquet", "--out", tmp_path / "out.parquet", "--workers", "3"
        ).returncode
        == 0
    )
    ours, theirs = pq.read_table(tmp_path / "out.parquet"), pq.read_table(pa.BufferReader(expected))
    assert ours.drop_columns("input").equals(theirs.drop_columns("input"))
