"""Drift: quiet on jobs like those in training, loud on another context, new layers, new options and
larger batches."""

import json
import random
import subprocess
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpumemnet.job.json_codec import job_to_dict
from gpumemnet.job.layers import Layer
from gpumemnet.job.measurement import Measurement
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.bundle import Bundle
from gpumemnet.predict.predictor import Predictor
from gpumemnet.site.drift import (
    ALPHA,
    DriftReport,
    find_drift,
)
from gpumemnet.site.observations import SOURCES, SiteRows, read_site_rows
from gpumemnet.units import MIB
from tests.parquet_jobs import write_jobs
from tests.registries import other_bundle
from tests.sites import A100, gpumemnet, published, site_rows, write_rows

MLP = "mlp"
LABELS_CONTEXT_MIB = 1429
"""The context of the published labels: these jobs are of a site with their driver."""


@cache
def bundle() -> Bundle:
    """The shipped bundle, as if it knew jobs of one family alone."""
    folder = Path(tempfile.mkdtemp(prefix="drift-")) / "bundle"
    return other_bundle(folder, "1", MLP, families=["mlp"])


@cache
def predictor() -> Predictor:
    return Predictor([bundle()], context_bytes=LABELS_CONTEXT_MIB * MIB)


def rows_of(measurements: list[Measurement]) -> SiteRows:
    return SiteRows.from_columns(
        [row.job for row in measurements],
        gpu=[row.gpu for row in measurements],
        label_bytes=[row.label_bytes for row in measurements],
        limit_bytes=[row.capacity_bytes for row in measurements],
    )


def jobs_of(count: int = 200, seed: int = 0) -> list[TrainingJob]:
    return [replace(row.job, traced_peak_bytes=None) for row in site_rows(count, seed=seed)]


def drawn(rows: SiteRows, seed: int, count: int) -> SiteRows:
    return rows.take(np.array(random.Random(seed).choices(range(len(rows)), k=count)))


def report_of(rows: SiteRows) -> DriftReport:
    return find_drift(rows, predictor())


def causes(report: DriftReport) -> set[str]:
    return {finding.kind for finding in report.causes}


def test_jobs_drawn_from_training_raise_no_alarm() -> None:
    rows = rows_of(list(published()))
    alarms = 0
    for seed in range(20):
        report = report_of(drawn(rows, seed, 200))
        alarms += any(finding.is_drift for finding in report.findings)
    assert alarms <= 20 * ALPHA


def test_replicas_start_no_retraining_that_cannot_learn_from_them() -> None:
    rows = rows_of(site_rows(200, shift_mib=0))
    spread = replace(rows, jobs=rows.jobs.with_numbers("ranks", np.full(len(rows), 8.0)))
    # their NCCL would hold nothing at all
    report = report_of(SiteRows.concatenate([rows.take(np.arange(100)), spread]))
    assert not report.causes
    assert report.notes[0].startswith("200 jobs: one of several replicas")
    assert sum(finding.kind == "error" for finding in report.findings) == 1


@pytest.mark.parametrize("shift_mib", [-900, 300])
def test_another_context_is_error_drift(shift_mib: int) -> None:
    report = report_of(rows_of(site_rows(60, shift_mib=shift_mib)))
    (error,) = (finding for finding in report.findings if finding.kind == "error")
    assert error.is_drift
    assert "error" in causes(report)
    assert ("coverage" in causes(report)) == (
        shift_mib > 0
    )  # less than predicted breaks no promise
    assert (error.family, error.gpu, error.jobs) == ("mlp", A100, 60)
    assert error.corrected < ALPHA
    assert "times what was expected" in error.sentence


def test_a_context_that_hardly_differs_is_none_however_sure_it_is() -> None:
    report = report_of(rows_of(site_rows(1000, shift_mib=-25)))
    (error,) = (finding for finding in report.findings if finding.kind == "error")
    assert error.corrected < ALPHA
    assert not error.is_drift
    assert not report.causes


def test_only_the_newest_jobs_count() -> None:
    old = replace(rows_of(site_rows(200, shift_mib=-900)), observed_at=np.arange(200.0))
    new = replace(
        rows_of(site_rows(200, shift_mib=0, seed=1)), observed_at=np.arange(1e6, 1e6 + 200)
    )
    rows = SiteRows.concatenate([new, old])
    assert not report_of(rows).causes
    assert report_of(replace(rows, observed_at=-rows.observed_at)).causes


def odd(job: TrainingJob) -> TrainingJob:
    """The job with a layer that no training job has."""
    totals: Any = dict.fromkeys(("total_activations", "total_parameters", "trainable_parameters"))
    return replace(job, layers=(*(job.layers or ()), Layer("fancy_norm", 64, 64)), **totals)


def test_new_layer_kinds_are_outside_the_support() -> None:
    jobs = jobs_of()
    report = report_of(SiteRows.from_columns([*map(odd, jobs[:40]), *jobs[40:]]))
    assert "support" in causes(report)
    assert "fancy_norm" in next(one.sentence for one in report.causes if one.kind == "support")


def test_larger_batches_are_no_drift_where_the_answers_are_right() -> None:
    large = sorted(published(), key=lambda row: row.job.batch_size)[-200:]
    assert not report_of(rows_of(large)).causes


def test_jobs_that_ran_out_of_memory_within_their_safe_bytes_break_the_promise() -> None:
    rows = rows_of(site_rows(100, shift_mib=0))
    is_oom = np.arange(100) < 10
    burst = replace(rows, label_bytes=np.where(is_oom, np.nan, rows.label_bytes), is_oom=is_oom)
    assert causes(report_of(burst)) == {"coverage"}
    # less than was asked for: no test of it
    tight = replace(burst, limit_bytes=np.where(is_oom, 512 * MIB, rows.limit_bytes))
    assert not report_of(tight).causes


def test_families_and_gpus_are_told_apart() -> None:
    good, bad = rows_of(site_rows(60, shift_mib=0)), rows_of(site_rows(60, shift_mib=900, seed=1))
    elsewhere = replace(bad, gpu=np.full(60, "NVIDIA A100-SXM4-80GB", dtype=object))
    alone = SiteRows.from_columns(jobs_of(1))
    report = report_of(SiteRows.concatenate([good, elsewhere, alone]))
    assert {finding.gpu for finding in report.causes} == {"NVIDIA A100-SXM4-80GB"}
    assert report.notes == ("mlp jobs: 1 of them, and 20 are needed to say anything",)


def test_what_cannot_be_tested_is_said() -> None:
    rows = rows_of(site_rows(30, shift_mib=0))
    report = report_of(replace(rows, gpu=np.full(30, "Voodoo 2", dtype=object)))
    assert "no profile of the Voodoo 2" in report.notes[0]
    assert [finding.kind for finding in report.findings] == ["support"]
    report = report_of(SiteRows.from_columns([replace(rows.jobs[0], family="cnn")] * 30))
    assert not report.findings
    assert "no model for cnn jobs is loaded" in report.notes[0]


# the command


def drift(*arguments: object) -> subprocess.CompletedProcess[str]:
    return gpumemnet("drift", "--context-mib", LABELS_CONTEXT_MIB, *arguments)


def test_exit_codes_for_cron(tmp_path: Path) -> None:
    good = write_rows(tmp_path / "good.parquet", site_rows(100, shift_mib=0))
    bad = write_rows(tmp_path / "bad.parquet", site_rows(100, shift_mib=400))
    quiet = drift(good, "--bundle", bundle().source)
    assert quiet.returncode == 0, quiet.stderr
    assert "No retraining is due." in quiet.stdout
    loud = drift(bad, "--json")
    assert loud.returncode == 10, loud.stderr
    document = json.loads(loud.stdout)
    assert document["drift"] is True
    assert {one["kind"] for one in document["findings"] if one["is_drift"]} == {"error", "coverage"}
    assert len(document["findings"]) == 3
    for_people = drift(bad)
    assert for_people.returncode == 10
    for words in (
        "mlp jobs on NVIDIA A100-SXM4-40GB",
        "drift",
        "a retraining is due (exit code 10)",
        "Bonferroni",
    ):
        assert words in for_people.stdout


def test_observations_and_plain_jobs_as_files(tmp_path: Path) -> None:
    assert "slurm_gpumem" in SOURCES
    observations = tmp_path / "seen.jsonl"
    lines = [
        {
            "job": job_to_dict(row.job),
            "gpu": "A100",
            "peak_bytes": row.label_bytes,
            "source": "slurm_gpumem",
        }
        for row in site_rows(50)
    ]
    observations.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert drift(observations).returncode == 10
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text("".join(json.dumps(job_to_dict(job)) + "\n" for job in jobs_of(50)))
    assert drift(jobs, "--bundle", bundle().source).returncode == 0
    write_jobs(tmp_path / "jobs.parquet", map(odd, jobs_of(100)))
    assert np.isnan(read_site_rows([tmp_path / "jobs.parquet"]).label_bytes).all()
    assert drift(tmp_path / "jobs.parquet", "--bundle", Path(bundle().source)).returncode == 10
