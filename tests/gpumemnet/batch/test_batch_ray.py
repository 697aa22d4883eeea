"""``--engine ray`` gives the answers of this machine's own processes, to the byte; skips itself
where Ray is not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpumemnet.batch.part_predictions import BatchOptions
from gpumemnet.batch.ray_engine import connect
from gpumemnet.batch.run import predict_files
from gpumemnet.errors import DatasetError
from tests.gpumemnet.batch.batch_files import refused, rejected, run, totals, write, write_lines

HAS_RAY = importlib.util.find_spec("ray") is not None


@pytest.mark.nightly
@pytest.mark.skipif(not HAS_RAY, reason="Ray is not installed: pip install -e '.[ray]'")
def test_ray_answers_as_this_machine_does(tmp_path: Path) -> None:
    write(tmp_path / "jobs.parquet", totals(30_000), row_group_size=7000)
    write_lines(tmp_path / "more.jsonl", ["{", "[]"])
    inputs = [str(tmp_path / "jobs.parquet"), str(tmp_path / "more.jsonl")]
    predict_files(inputs, str(tmp_path / "local.parquet"), BatchOptions(), workers=1)
    done = run(*inputs, "--out", tmp_path / "ray.parquet", "--engine", "ray")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ray.parquet").read_bytes() == (tmp_path / "local.parquet").read_bytes()
    assert rejected(tmp_path / "ray.rejected.jsonl") == rejected(tmp_path / "local.rejected.jsonl")
    (tmp_path / "jobs.parquet").write_bytes((tmp_path / "jobs.parquet").read_bytes()[:-5])
    assert "no whole Parquet file" in refused(
        *inputs, "--out", tmp_path / "ray.parquet", "--engine", "ray"
    )


def test_without_ray_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    write(tmp_path / "jobs.parquet", totals(3))
    assert "pip install -e '.[ray]'" in refused(
        tmp_path / "jobs.parquet", "--out", tmp_path / "out.csv", "--engine", "ray"
    )


def test_a_ray_node_that_does_not_start_is_one_sentence() -> None:
    def init(**options: object) -> None:
        raise Exception(
            "The raylet log is in /tmp/ray.\nThe current node timed out during startup."
        )

    with pytest.raises(
        DatasetError, match=r"cannot be reached \(The current node timed out during startup\.\)"
    ):
        connect(SimpleNamespace(init=init), {})
