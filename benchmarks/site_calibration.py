"""Measures calibration and drift tests on simulated sites, made from the published readings of
3,000 MLPs.

At a simulated site the readings are 900 MiB lower, as under a newer driver.  Some rows calibrate
the model; 500 others test it. Every figure is a mean over the seeds.  Run it as ``python
benchmarks/site_calibration.py``; it takes two minutes.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from gpumemnet.predict.bundle import Bundle, load_bundle, save_bundle, shipped_bundles
from gpumemnet.predict.predictor import Predictor
from gpumemnet.site.calibration import calibrate
from gpumemnet.site.calibration_cards import calibrated_cards
from gpumemnet.site.drift import find_drift
from gpumemnet.site.observations import SiteRow, SiteRows, read_site_rows
from gpumemnet.site.training_reference import training_reference
from gpumemnet.units import MIB

DATASET: Final = (
    Path(__file__).parents[1] / "dataset_builder" / "datasets" / "published_mlp_a100.parquet"
)
MODEL: Final = "mlp-a100-published"
SHIFT_MIB: Final = -900
COVERAGES: Final = (0.9, 0.95, 0.99)
TEST_JOBS: Final = 500


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    seeds = parser.parse_args().seeds
    rows = [
        replace(row, job=replace(row.job, traced_peak_bytes=None))
        for row in read_site_rows([DATASET]).rows
    ]
    bundles = [bundle for bundle in shipped_bundles() if bundle.card.name == MODEL]
    calibration_table(rows, bundles, seeds)
    drift_table(rows, bundles, seeds)
    return 0


def calibration_table(rows: Sequence[SiteRow], bundles: Sequence[Bundle], seeds: int) -> None:
    """Print error, coverage and unused memory by number of calibration jobs; 0 is the shipped
    bundle."""
    print_line(
        "| jobs | median error | took more than expected | "
        + " | ".join(f"within {level:.0%}" for level in COVERAGES)
        + " |"
    )
    print_line("|---|---|---|" + "---|" * len(COVERAGES))
    for count in (0, 20, 50, 100, 300):
        figures = []
        for seed in range(seeds if count else 1):
            drawn = [
                shifted(row, SHIFT_MIB)
                for row in random.Random(seed).sample(list(rows), count + TEST_JOBS)
            ]
            model = Predictor(calibrated(drawn[TEST_JOBS:], bundles) if count else bundles)
            figures.append(evaluate(model, drawn[:TEST_JOBS]))
        means = np.mean(figures, axis=0)
        bounds = [
            f"{share:.1%}, {over:+.1%} memory"
            for share, over in zip(means[3::2], means[4::2], strict=True)
        ]
        print_line(
            f"| {count} | {means[0]:,.1f} MiB, {means[1]:.2f} % | {means[2]:.0%} | "
            + " | ".join(bounds)
            + " |"
        )
    print_line("")


def calibrated(rows: Sequence[SiteRow], bundles: Sequence[Bundle]) -> list[Bundle]:
    """Calibrate the bundles on ``rows``, and return them as loaded from disk."""
    import tempfile

    made = calibrate(SiteRows(tuple(rows), {}, {}), bundles)
    with tempfile.TemporaryDirectory() as folder:
        return [
            load_bundle(save_bundle(Path(folder) / one.card.name, one.model, card).source)
            for one, card in calibrated_cards(made)
        ]


def evaluate(predictor: Predictor, rows: Sequence[SiteRow]) -> list[float]:
    """Return the figures of one predictor on ``rows``.

    They are the median error in MiB and in per cent, and the share of jobs that took more than
    expected.  For each coverage, the share of jobs within the bound and the unused memory follow.
    """
    labels = np.array([row.label_bytes for row in rows], dtype=float)
    jobs = [row.job for row in rows]
    expected = np.array([one.expected_bytes for one in predictor.predict_many(jobs)], dtype=float)
    errors = np.abs(expected - labels)
    figures = [
        float(np.median(errors)) / MIB,
        float(np.median(errors / labels)) * 100,
        float(np.mean(expected < labels)),
    ]
    for coverage in COVERAGES:
        safe = np.array(
            [one.safe_bytes for one in predictor.predict_many(jobs, coverage=coverage)], dtype=float
        )
        figures += [float(np.mean(labels <= safe)), float(safe.sum() / labels.sum() - 1)]
    return figures


def drift_table(rows: Sequence[SiteRow], bundles: Sequence[Bundle], seeds: int) -> None:
    """Print how often drift is detected, by kind of drift and number of jobs."""
    predictor = Predictor(
        bundles, keeps_label_context=True
    )  # a site whose context the answers hold
    reference = {"mlp": training_reference([row.job for row in rows])}
    cases = {
        "nothing": lambda row, _: row,
        "context 30 MiB larger": lambda row, _: shifted(row, 30),
        "context 100 MiB larger": lambda row, _: shifted(row, 100),
        "context 100 MiB smaller": lambda row, _: shifted(row, -100),
        "every tenth job in bf16": lambda row, at: (
            replace(row, job=replace(row.job, precision="bf16")) if at % 10 == 0 else row
        ),
        "every fourth job in bf16": lambda row, at: (
            replace(row, job=replace(row.job, precision="bf16")) if at % 4 == 0 else row
        ),
        "batches twice as large, jobs alone": lambda row, _: SiteRow(
            job=replace(row.job, batch_size=min(2 * row.job.batch_size, 1023))
        ),
    }
    counts = (50, 100, 200)
    print_line("| drifted | " + " | ".join(f"found among {count} jobs" for count in counts) + " |")
    print_line("|---|" + "---|" * len(counts))
    for name, change in cases.items():
        shares = []
        for count in counts:
            drifts = 0
            for seed in range(seeds):
                sample = random.Random(seed).choices(list(rows), k=count)
                drifts += find_drift(
                    [change(row, at) for at, row in enumerate(sample)], predictor, reference
                ).is_drift
            shares.append(f"{drifts} of {seeds}")
        print_line(f"| {name} | " + " | ".join(shares) + " |")


def shifted(row: SiteRow, shift_mib: int) -> SiteRow:
    """Return the row with ``shift_mib`` MiB added to its label."""
    return replace(row, label_bytes=(row.label_bytes or 0) + shift_mib * MIB)


def print_line(line: str) -> None:
    """Print a line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
