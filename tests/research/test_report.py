"""The report, on jobs and answers made by hand, so that every figure can be worked out by hand."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from gpumemnet.job.job_table import JobTable
from gpumemnet.units import GIB
from models.evaluation import Answers
from research.cli import main
from research.report import pictures, write_report
from research.report.figures import (
    GIB_BINS,
    Section,
    candidate_figures,
    coverages,
    independent_rows,
    octave_groups,
    octave_name,
    reliability,
    share_interval,
    wilson,
)
from research.report.tables import TRACED, bin_table, published_beside
from tests.jobs import SMALL_LAYERS, small_job

Array = NDArray[np.float64]
OURS = "ours"
PNG = b"\x89PNG\r\n\x1a\n"


def answers(expected: Array, safe: Array | None = None, **more: Any) -> Answers:
    return Answers(
        expected,
        np.full(len(expected), np.nan) if safe is None else safe,
        more.pop("bins", {}),
        **more,
    )


def section(
    labels_gib: list[float], candidates: Mapping[str, Answers] | None = None, **changes: Any
) -> Section:
    """Jobs with these labels, each of its own architecture; by default everything is predicted 1 %
    too high."""
    labels = np.array(labels_gib) * GIB
    jobs = tuple(small_job(layers=SMALL_LAYERS * (1 + index)) for index in range(len(labels)))
    values: dict[str, Any] = {
        "slug": "some",
        "title": "Some jobs",
        "about": "By hand.",
        "is_measured": True,
        "jobs": jobs,
        "features": np.column_stack([labels, np.arange(len(labels)), np.ones(len(labels))]),
        "label_bytes": labels,
        "folds": np.zeros(len(labels), dtype=np.int64),
        "answers": candidates or {OURS: answers(1.01 * labels, 1.1 * labels)},
        "candidate": OURS,
    }
    return Section(**{**values, **changes})


def many(count: int = 48, **changes: Any) -> Section:
    """Jobs from 0.6 GiB up, half of them SGD, with everything that a candidate can answer."""
    labels = np.geomspace(0.6, 6.0, count)
    right = np.zeros((count, 8))
    right[np.arange(count), labels.astype(int)] = 0.9
    right[:, 7] += 0.1
    full = answers(
        labels * GIB,
        1.2 * labels * GIB,
        probabilities=right,
        bounds_bytes={0.5: labels * GIB, 0.99: 1.2 * labels * GIB},
    )
    candidates = {
        "flat": answers(np.full(count, 2.0 * GIB)),
        "calibrated physics (3 numbers)": answers(1.2 * labels * GIB),
        OURS: full,
    }
    jobs = JobTable.from_jobs(
        [
            small_job(batch_size=1 + index, optimizer=("adam", "sgd")[index % 2])
            for index in range(count)
        ]
    )
    return section(labels.tolist(), **{"candidates": candidates, "jobs": jobs, **changes})


def test_bins() -> None:
    # Bins of 1 GiB: right, right, too low, none; the job of 50 GiB is beyond the 40 GiB that they
    # are judged to.
    expected = np.array([0.5, 1.2, 1.9, np.nan, 50.0]) * GIB
    figures = candidate_figures(
        section([0.4, 1.5, 2.5, 3.5, 50.5], {OURS: answers(expected)}), OURS
    )
    gib = figures.bins[GIB_BINS.name]
    assert (gib.jobs, gib.accuracy, gib.too_low) == (4, 0.5, 0.25)
    assert gib.macro_f1 == pytest.approx(
        (1 + 2 / 3 + 0 + 0) / 4
    )  # of bin 1: precision 1/2, recall 1
    assert figures.bins["published-8000mib"].jobs == 5
    assert figures.bins["published-8000mib"].accuracy == 0.8
    assert figures.without_expected == pytest.approx(0.2)


def test_amounts() -> None:
    labels = [1.0, 2.0, 4.0, 8.0]
    expected = np.array([1.05, 1.99, 3.0, 8.72]) * GIB  # +5 %, −0.5 %, −25 %, +9 %
    safe = np.array([1.5, 1.9, np.nan, 8.8]) * GIB
    figures = candidate_figures(section(labels, {OURS: answers(expected, safe)}), OURS)
    assert figures.median_error == pytest.approx((0.05 + 0.09) / 2)
    assert figures.median_error_mib == pytest.approx((0.05 + 0.72) / 2 * 1024)
    assert figures.p95_error == pytest.approx(0.09 + 0.85 * 0.16)
    assert figures.close == 0.75
    assert figures.under_predicted == 0.25
    assert figures.without_safe == 0.25
    assert figures.above_safe == pytest.approx(1 / 3)
    assert figures.over_allocated == pytest.approx(0.1)
    some = candidate_figures(section(labels, {OURS: answers(expected, safe)}), OURS, np.array([2]))
    assert (some.jobs, some.under_predicted, some.without_safe) == (1, 1.0, 1.0)
    assert math.isnan(some.above_safe)
    assert math.isnan(some.over_allocated)


def test_intervals() -> None:
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    alternating, alike = np.arange(100) % 2 == 0, np.arange(100) < 50
    pairs = np.arange(100) // 2
    assert independent_rows(alternating, np.arange(100)) == pytest.approx(99)
    assert independent_rows(alike, pairs) == pytest.approx(
        49
    )  # both of a pair alike: half as much is known
    assert independent_rows(np.ones(100, dtype=bool), pairs) == 50
    low, high = share_interval(alike, pairs)
    assert low < 0.4038 < 0.5962 < high
    assert all(
        map(math.isnan, share_interval(np.array([], dtype=bool), np.array([], dtype=np.int64)))
    )


def test_octaves() -> None:
    labels = np.array([0.1, 0.3, 0.5, 0.99, 1.0, 3.9, 4.0]) * GIB
    groups = octave_groups(labels, np.arange(7))
    assert {group.name: group.rows.tolist() for group in groups} == {
        "below 0.5 GiB": [0, 1],
        "0.5–1 GiB": [2, 3],
        "1–2 GiB": [4],
        "2–4 GiB": [5],
        "4–8 GiB": [6],
    }
    assert octave_name(4) == "16–32 GiB"


def test_reliability() -> None:
    probabilities = np.array([[0.95, 0.05], [0.95, 0.05], [0.35, 0.65], [np.nan, np.nan]])
    found = reliability(
        section([0.5, 1.5, 7.0, 0.5], {OURS: answers(np.ones(4), probabilities=probabilities)}),
        OURS,
    )
    assert found is not None
    assert found.jobs == (0, 0, 0, 0, 0, 0, 1, 0, 0, 2)
    assert (found.accuracy[9], found.accuracy[6]) == (
        0.5,
        1.0,
    )  # the last bin is open, so 7 GiB are in it
    assert found.expected_calibration_error == pytest.approx((2 * 0.45 + 0.35) / 3)
    assert reliability(section([0.5]), OURS) is None


def test_coverage() -> None:
    labels = np.array([1.0, 2.0, 3.0, 4.0]) * GIB
    bounds = {0.99: 2 * labels, 0.5: np.array([1.0, 1.5, 4.0, np.nan]) * GIB}
    jobs = (small_job(family="cnn"), *[small_job()] * 3)
    points = coverages(
        section([1, 2, 3, 4], {OURS: answers(labels, bounds_bytes=bounds)}, jobs=jobs), OURS
    )
    assert [(point.family, point.nominal, point.empirical, point.jobs) for point in points] == [
        ("mlp", 0.5, 0.5, 2),
        ("mlp", 0.99, 1.0, 3),
        ("cnn", 0.5, 1.0, 1),
        ("cnn", 0.99, 1.0, 1),
    ]
    only_safe = coverages(section([1, 2]), OURS)
    assert [(point.nominal, point.empirical) for point in only_safe] == [(0.99, 1.0)]


def test_published_figures_stand_beside_measured_jobs_of_one_family() -> None:
    one = section([1.0])
    table = bin_table(one, {OURS: candidate_figures(one, OURS)})
    assert (
        "| as published by GPUMemNet (its own split), MLP-based | – | – | – | 95 % | 97 % | – |"
        in table
    )
    assert "| **ours** | **100.0 % (" in table
    assert not published_beside(section([1.0], is_measured=False))
    assert not published_beside(section([1.0], names=("net",)))
    assert not published_beside(section([1.0, 1.0], jobs=(small_job(), small_job(family="cnn"))))


@pytest.fixture
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "RESOLUTION", 40)


def links(report: str) -> list[str]:
    return re.findall(r"!\[[^\]]*\]\(([^)]*)\)", report)


@pytest.mark.usefixtures("small_pictures")
def test_files(tmp_path: Path) -> None:
    paths = write_report(
        [many(is_measured=False, title="Jobs [traced]")], tmp_path / "new", notes=["A remark."]
    )
    assert sorted(paths) == sorted((tmp_path / "new").iterdir())
    report = paths[0].read_text()
    pictures = [path.name for path in paths if path.suffix == ".png"]
    assert sorted(links(report)) == sorted(pictures)
    assert pictures == [
        *(f"some-{word}.png" for word in ("coverage", "reliability", "scatter", "confusion")),
    ]
    assert all(path.read_bytes().startswith(PNG) for path in paths if path.suffix == ".png")
    assert "A remark." in report
    assert "(labels traced, not measured)" in report
    tables = report.count("| --- |")
    assert tables == 3  # bins, bytes, by optimizer
    assert len(re.findall(rf"{re.escape(TRACED)}\n\n\|", report)) == tables
    document = json.loads(paths[1].read_text())
    (only,) = document["sections"]
    assert only["labels"] == "traced"
    assert only["candidates"][OURS]["bins"][GIB_BINS.name]["accuracy"] == 1.0
    assert only["candidates"]["flat"]["above_safe"] is None
    assert only["groups"]["optimizer"]["sgd"]["jobs"] == 24


@pytest.mark.nightly
def test_the_report_runs_from_the_committed_data(tmp_path: Path) -> None:
    out = str(tmp_path / "report")
    assert main(["report", "--smoke", "--workers", "1", "--out", out]) == 0
    text = (tmp_path / "report" / "report.md").read_text("utf-8")
    assert "its figures say nothing" in text
    for section in (
        "cnn jobs, measured",
        "cnn jobs, traced labels (labels traced, not measured)",
        "Real cnn models",
    ):
        assert f"## {section}" in text
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert len(pictures) > 10
    assert all((tmp_path / "report" / name).stat().st_size > 5_000 for name in pictures)
    document = json.loads((tmp_path / "report" / "report.json").read_text("utf-8"))
    assert {section["slug"] for section in document["sections"]} == {
        "measured-cnn",
        "traced-cnn",
        "zoo-cnn",
    }
