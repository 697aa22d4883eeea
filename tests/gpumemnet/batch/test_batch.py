"""``gpumemnet predict FILE --out FILE`` on real files: every format, bad rows, other people's
files, stores."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.csv
import pytest

from gpumemnet.batch.part_predictions import BatchOptions
from gpumemnet.batch.run import predict_files
from gpumemnet.cli import main
from gpumemnet.errors import DatasetError, InvalidRequestError
from gpumemnet.job.job_files import VERSION_KEY
from gpumemnet.job.json_codec import job_to_dict
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import ceil_mib
from tests.gpumemnet.batch.batch_files import (
    answers,
    refused,
    rejected,
    run,
    totals,
    write,
    write_lines,
)
from tests.jobs import small_job
from tests.parquet_jobs import write_jobs

PREDICTOR = Predictor.default()
JOBS = [
    small_job(),
    small_job(batch_size=512),
    small_job(optimizer="sgd"),
    small_job(batch_size=10**6),
    small_job(family="cnn"),
]


def test_a_file_is_answered_as_the_predictor_answers(tmp_path: Path) -> None:
    write_jobs(tmp_path / "jobs.parquet", JOBS)
    done = run(tmp_path / "jobs.parquet", "--out", tmp_path / "out.parquet")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "5 jobs predicted" in done.stderr
    hashes = {bundle.card.name: bundle.sha256 for bundle in PREDICTOR.bundles}
    for number, (row, estimate) in enumerate(
        zip(answers(tmp_path / "out.parquet"), PREDICTOR.predict_many(JOBS), strict=True), start=1
    ):
        lower_bytes, upper_bytes = estimate.bins.bounds_bytes(estimate.bin_index)
        assert row == {
            "input": str(tmp_path / "jobs.parquet"),
            "row": number,
            "job_id": None,
            "request_mib": ceil_mib(estimate.expected_bytes),
            "limit_mib": None if estimate.safe_bytes is None else ceil_mib(estimate.safe_bytes),
            "startup_peak_bytes": estimate.startup_peak_bytes,
            "bin_index": estimate.bin_index,
            "bin_lower_bytes": lower_bytes,
            "bin_upper_bytes": upper_bytes,
            "in_support": estimate.in_support,
            "reasons": "; ".join(estimate.reasons) or None,
            "gpu": estimate.gpu,
            "model": estimate.estimator,
            "model_sha256": hashes[estimate.estimator],
        }
    assert {path.name for path in tmp_path.iterdir()} == {"jobs.parquet", "out.parquet"}


def test_bad_rows_go_to_a_file_of_their_own(tmp_path: Path) -> None:
    good = job_to_dict(small_job()) | {"id": 7}
    lines = [
        good,
        "{",
        {**good, "batch_size": 0},
        "",
        [1],
        {**good, "batchsize": 1},
        {**good, "layers": [["linear", 1]]},
        good,
    ]
    write_lines(tmp_path / "jobs.jsonl", lines)
    done = run(tmp_path / "jobs.jsonl", "--out", tmp_path / "answers.parquet")
    assert done.returncode == 0, done.stderr
    assert "2 jobs predicted" in done.stderr
    assert "5 rows were rejected" in done.stderr
    assert [(row["row"], row["job_id"]) for row in answers(tmp_path / "answers.parquet")] == [
        (1, "7"),
        (8, "7"),
    ]
    wrong = rejected(tmp_path / "answers.rejected.jsonl")
    assert [(row["row"], row["field"]) for row in wrong] == [
        (2, ""),
        (3, "batch_size"),
        (5, ""),
        (6, "batchsize"),
        (7, "layers[0]"),
    ]
    assert wrong[1]["reason"] == "must be between 1 and 2147483647, not 0"
    assert "did you mean 'batch_size'?" in wrong[3]["reason"]
    assert {row["input"] for row in wrong} == {str(tmp_path / "jobs.jsonl")}
    # The next run has nothing to reject, and leaves no old file beside its answers.
    write_lines(tmp_path / "jobs.jsonl", [good])
    predict_files([str(tmp_path / "jobs.jsonl")], str(tmp_path / "answers.parquet"), BatchOptions())
    assert not (tmp_path / "answers.rejected.jsonl").exists()


def test_bad_lines_of_csv(tmp_path: Path) -> None:
    header = "id,family,batch_size,input_elements,optimizer,precision,total_activations,total_parameters,cudnn_benchmark,colour"
    good = "a,mlp,64,100,adam,fp32,1000,100000,,red"
    lines = [
        *(
            header,
            good,
            good.replace("64", "64.5"),
            good + ",more",
            "",
            good.replace("adam", "adamn"),
        ),
        *(
            good.replace(",,", ",maybe,"),
            good.replace("fp32", '"fp32"'),
            '"never closed',
            good.replace("64", "99999999999999999999"),
        ),
    ]
    (tmp_path / "jobs.csv").write_text("\n".join(lines))
    outcome = predict_files(
        [str(tmp_path / "jobs.csv")], str(tmp_path / "out.parquet"), BatchOptions()
    )
    assert (outcome.tally.rows, outcome.tally.answered, outcome.tally.rejected) == (9, 2, 6)
    assert [row["row"] for row in answers(tmp_path / "out.parquet")] == [1, 7]
    wrong = {
        row["row"]: (row["field"], row["reason"])
        for row in rejected(tmp_path / "out.rejected.jsonl")
    }
    assert wrong[2] == ("batch_size", "must be a whole number, not 64.5")
    assert wrong[3] == wrong[8] == ("", "is no line of CSV with 10 columns in UTF-8")
    assert wrong[5][0] == "optimizer"
    assert wrong[6] == ("cudnn_benchmark", "must be true or false, not 'maybe'")
    assert wrong[9][0] == "batch_size"


def test_jobs_that_no_model_answers_are_rejected(tmp_path: Path) -> None:
    write(tmp_path / "jobs.parquet", totals(20))
    write_jobs(tmp_path / "layers.parquet", JOBS[:2])
    options = BatchOptions(encoder="transformer")
    outcome = predict_files(
        [str(tmp_path / "jobs.parquet"), str(tmp_path / "layers.parquet")],
        str(tmp_path / "out.csv"),
        options,
    )
    assert (outcome.tally.answered, outcome.tally.rejected) == (2, 20)
    assert "needs `layers`" in rejected(tmp_path / "out.rejected.jsonl")[0]["reason"]
    with pytest.raises(DatasetError, match="none of the 20 rows is a job that can be answered"):
        predict_files([str(tmp_path / "jobs.parquet")], str(tmp_path / "nothing.csv"), options)
    assert not (tmp_path / "nothing.csv").exists()
    assert len(rejected(tmp_path / "nothing.rejected.jsonl")) == 20


def test_globs_and_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (2, 1):
        write(tmp_path / f"week{number}.parquet", totals(5, seed=number))
    write_lines(tmp_path / "queue.jsonl", [job_to_dict(small_job())])
    monkeypatch.chdir(tmp_path)
    predict_files(["week*.parquet", "queue.jsonl", "week2.parquet"], "out.jsonl", BatchOptions())
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    expected = [("week1.parquet", row) for row in range(1, 6)] + [
        ("week2.parquet", row) for row in range(1, 6)
    ]
    assert [(row["input"], row["row"]) for row in rows] == [*expected, ("queue.jsonl", 1)]


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_counts_with_gaps_as_pandas_writes_them(tmp_path: Path, ending: str) -> None:
    table = totals(4).append_column("sequence_length", pa.array([128, None, 64, None], pa.int64()))
    frame = table.to_pandas()
    frame.loc[3, "sequence_length"] = 1.5
    path = tmp_path / f"jobs.{ending}"
    frame.to_parquet(path) if ending == "parquet" else frame.to_csv(path, index=False)
    done = predict_files([str(path)], str(tmp_path / "out.parquet"), BatchOptions())
    assert (done.tally.answered, done.tally.rejected) == (3, 1)
    [wrong] = rejected(tmp_path / "out.rejected.jsonl")
    assert (wrong["row"], wrong["field"]) == (4, "sequence_length")


def test_ids_come_from_the_column_that_is_named(tmp_path: Path) -> None:
    table = totals(3).append_column("slurm", pa.array([11, None, 13]))
    write(tmp_path / "jobs.parquet", table)
    predict_files(
        [str(tmp_path / "jobs.parquet")],
        str(tmp_path / "out.parquet"),
        BatchOptions(id_column="slurm"),
    )
    assert [row["job_id"] for row in answers(tmp_path / "out.parquet")] == ["11", None, "13"]
    assert "has no column 'pbs'" in refused(
        tmp_path / "jobs.parquet", "--out", tmp_path / "out.parquet", "--id-column", "pbs"
    )


def test_the_options_are_those_of_one_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_jobs(tmp_path / "jobs.parquet", JOBS)
    options = [
        "--gpu",
        "L4",
        "--bin-width",
        "8000",
        "--coverage",
        "0.9",
        "--encoder",
        "mlp",
    ]
    assert (
        main(
            [
                "predict",
                str(tmp_path / "jobs.parquet"),
                "--out",
                str(tmp_path / "out.parquet"),
                *options,
            ]
        )
        == 0
    )
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "jobs.parquet"), "--json", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    for row, line in zip(answers(tmp_path / "out.parquet"), map(json.loads, lines), strict=True):
        assert row["request_mib"] == ceil_mib(line["expected_bytes"])
        assert row["limit_mib"] == (line["safe_bytes"] and ceil_mib(line["safe_bytes"]))
        assert (row["bin_index"], row["gpu"], row["model"]) == (
            line["bin"]["index"],
            "NVIDIA L4",
            "mlp",
        )
        assert (
            row["bin_lower_bytes"] == line["bin"]["lower_bytes"] == 8000 * 2**20 * row["bin_index"]
        )


# Files that are not as they should be.


def test_files_that_cannot_be_read_are_one_sentence(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.parquet", totals(3000)).read_bytes()
    out = tmp_path / "out.parquet"
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    assert "cut.parquet is no whole Parquet file" in refused(tmp_path / "cut.parquet", "--out", out)
    (tmp_path / "empty.parquet").write_bytes(b"")
    assert "empty.parquet is no whole Parquet file" in refused(
        tmp_path / "empty.parquet", "--out", out
    )
    (tmp_path / "spoilt.parquet").write_bytes(whole[:100] + bytes(2000) + whole[2100:])
    assert "spoilt.parquet is" in refused(tmp_path / "spoilt.parquet", "--out", out)
    (tmp_path / "empty.csv").write_bytes(b"")
    assert "empty.csv holds no jobs: the column 'family' is missing" in refused(
        tmp_path / "empty.csv", "--out", out
    )
    future = totals(3).replace_schema_metadata({VERSION_KEY: b"9"})
    write(tmp_path / "future.parquet", future)
    assert "dataset version 9, and this version of gpumemnet reads 1" in refused(
        tmp_path / "future.parquet", "--out", out
    )
    write(
        tmp_path / "words.parquet",
        totals(3).set_column(2, "batch_size", pa.array(["1", "2", None])),
    )
    assert "'batch_size' is string, and must hold whole numbers" in refused(
        tmp_path / "words.parquet", "--out", out
    )
    assert not out.exists()


@pytest.mark.parametrize(
    ("jobs", "out", "says"),
    [
        ("jobs.xlsx", "out.parquet", "jobs: jobs.xlsx must end in .parquet, .csv, .jsonl, .ndjson"),
        ("nothing.parquet", "out.parquet", "jobs: nothing.parquet does not exist"),
        ("*.csv", "out.parquet", "jobs: *.csv: no file has such a name"),
        ("jobs.parquet", "out.xlsx", "out: out.xlsx must end in"),
        ("jobs.parquet", "nowhere/out.csv", "out: the folder nowhere does not exist"),
        ("jobs.parquet", "jobs.parquet", "jobs.parquet is one of the inputs"),
        ("gopher://jobs.csv", "out.csv", "fsspec knows no store called gopher"),
    ],
)
def test_places_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: str, out: str, says: str
) -> None:
    write(tmp_path / "jobs.parquet", totals(3))
    monkeypatch.chdir(tmp_path)
    with pytest.raises((DatasetError, InvalidRequestError)) as caught:
        predict_files([jobs], out, BatchOptions())
    assert says in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"jobs.parquet"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--coverage", "2"], "coverage: must be between"),
        (["--engine", "spark"], "engine: must be one of local, ray"),
        (["--json"], "do not go with --out"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: list[str], says: str) -> None:
    write(tmp_path / "jobs.parquet", totals(3))
    assert says in refused(tmp_path / "jobs.parquet", "--out", tmp_path / "out.parquet", *options)


def test_a_queue_may_be_empty(tmp_path: Path) -> None:
    write(tmp_path / "jobs.parquet", totals(0))
    (tmp_path / "jobs.jsonl").write_text("\n \n")
    outcome = predict_files(
        [str(tmp_path / "jobs.parquet"), str(tmp_path / "jobs.jsonl")],
        str(tmp_path / "o.parquet"),
        BatchOptions(),
    )
    assert outcome.tally.answered == 0
    assert answers(tmp_path / "o.parquet") == []


# Stores.


def test_a_store_is_read(tmp_path: Path) -> None:
    local = write(tmp_path / "jobs.parquet", totals(50))
    memory = fsspec.filesystem("memory")
    for name in ("a", "b"):
        memory.pipe(f"/history/{name}.parquet", local.read_bytes())
    memory.pipe("/history/c.jsonl", json.dumps(job_to_dict(small_job())).encode() + b"\n{\n")
    patterns = ["memory://history/*.parquet", "memory://history/c.jsonl"]
    out = tmp_path / "all.parquet"
    outcome = predict_files(patterns, str(out), BatchOptions())
    assert (outcome.tally.answered, outcome.rejected) == (101, tmp_path / "all.rejected.jsonl")
    rows = answers(out)
    assert [row["row"] for row in rows] == [*range(1, 51), *range(1, 51), 1]
    assert {row["input"] for row in rows} == {
        "memory:///history/a.parquet",
        "memory:///history/b.parquet",
        patterns[1],
    }
    with pytest.raises(InvalidRequestError, match="does not exist"):
        predict_files(["memory://history/d.csv"], str(out), BatchOptions())
    with pytest.raises(InvalidRequestError, match="must be a local file"):
        predict_files(patterns, "memory://answers/all.parquet", BatchOptions())
