"""Real networks in training, calibration and evaluation: labels above the context, families kept
together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gpumemnet.job.dataset import read_dataset, write_dataset
from models.training.data import load_labelled_jobs, with_real_networks
from research.real_networks import write_report

DATASETS = Path(__file__).resolve().parents[2] / "dataset_builder/datasets"
RUNS = DATASETS / "real_runs"


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A hundred sampled transformers, and eight runs of each of six families of real ones."""
    folder = tmp_path_factory.mktemp("real")
    sampled = list(read_dataset(DATASETS / "traced_transformer_h200.parquet"))[:140]
    by_family: dict[str, int] = {}
    runs = []
    for row in read_dataset(RUNS / "published_timm_a100.parquet"):
        is_wanted = (
            row.job.family == "transformer"
            and row.status == "ok"
            and row.label_state == "steady"
            and bool(row.traced)
        )
        count = by_family.get(row.split_group, 0)
        if is_wanted and count < 8 and (row.split_group in by_family or len(by_family) < 6):
            by_family[row.split_group] = count + 1
            runs.append(row)
    write_dataset(folder / "sampled.parquet", iter(sampled))
    write_dataset(folder / "runs.parquet", iter(runs))
    return folder / "sampled.parquet", folder / "runs.parquet"


def test_real_runs_join_the_training_jobs_with_the_context_of_its_labels(
    few: tuple[Path, Path],
) -> None:
    sampled, runs = few
    data = load_labelled_jobs(sampled, "transformer")
    both = with_real_networks(data, [runs])
    assert len(both.calibration_rows) == len(both) - len(data) == 48
    assert len(both.real_families) == 6
    assert set(both.groups[: len(data)]).isdisjoint(both.groups[len(data) :])
    traced = np.array([row.traced["steady_reserved_bytes"] for row in read_dataset(runs)])
    # Half of the readings lie above the trace and half below it, once the constant of the readings
    # is the labels' context.
    assert np.median(both.label_bytes[len(data) :] - traced) == pytest.approx(
        float(data.context_bytes or 0)
    )


def test_the_report_has_a_line_for_every_estimator(few: tuple[Path, Path], tmp_path: Path) -> None:
    sampled, runs = few
    steps: list[str] = []
    path = write_report(
        {"transformer": sampled}, [runs], tmp_path, 0, lambda step, share: steps.append(step)
    )
    lines = [
        line.split(" | ")
        for line in path.read_text("utf-8").splitlines()
        if line.startswith("| transformer | published |")
    ]
    assert [line[2] for line in lines] == [
        "closed form, scaled",
        "closed form, line",
        "closed form, as shipped",
        "MLP-based classifier",
    ]
    assert all(line[3] == "48" for line in lines)
    assert len(steps) == 5
