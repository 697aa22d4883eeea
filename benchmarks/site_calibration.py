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
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from gpumemnet.job.job_table import JobTable
from gpumemnet.predict.bundle import Bundle, load_bundle, save_bundle, shipped_bundles
from gpumemnet.predict.predictor import Predictor
from gpumemnet.site.calibration import calibrate
from gpumemnet.site.calibration_cards import calibrated_cards
from gpumemnet.site.drift import find_drift
from gpumemnet.site.observations import SiteRows, read_site_rows
from gpumemnet.units import MIB

DATASET: Final = (
    Path(__file__).parents[1] / "dataset_builder" / "datasets" / "published_mlp_a100.parquet"
)
MODEL: Final = "mlp"
SHIFT_MIB: Final = -900
COVERAGES: Final = (0.9, 0.95, 0.99)
TEST_JOBS: Final = 500


def main() -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    seeds = parser.parse_args().seeds
    rows = read_site_rows([DATASET])
    rows = replace(rows, jobs=rows.jobs.with_numbers("traced_peak_bytes", np.zeros(len(rows))))
    bundles = [bundle for bundle in shipped_bundles() if bundle.card.name == MODEL]
    calibration_table(rows, bundles, seeds)
    drift_table(rows, bundles, seeds)
    return 0


def calibration_table(rows: SiteRows, bundles: Sequence[Bundle], seeds: int) -> None:
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
            places = random.Random(seed).sample(range(len(rows)), count + TEST_JOBS)
            drawn = shifted(rows.take(np.array(places)), SHIFT_MIB)
            tested, known = (
                drawn.take(np.arange(len(drawn))[part])
                for part in (slice(TEST_JOBS), slice(TEST_JOBS, None))
            )
            model = Predictor(calibrated(known, bundles) if count else bundles)
            figures.append(evaluate(model, tested))
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


def calibrated(rows: SiteRows, bundles: Sequence[Bundle]) -> list[Bundle]:
    """Calibrate the bundles on ``rows``, and return them as loaded from disk."""
    import tempfile

    made = calibrate(rows, bundles)
    with tempfile.TemporaryDirectory() as folder:
        return [
            load_bundle(save_bundle(Path(folder) / one.card.name, one.model, card).source)
            for one, card in calibrated_cards(made)
        ]


def evaluate(predictor: Predictor, rows: SiteRows) -> list[float]:
    """Return the figures of one predictor on ``rows``.

    They are the median error in MiB and in per cent, and the share of jobs that took more than
    expected.  For each coverage, the share of jobs within the bound and the unused memory follow.
    """
    labels = rows.label_bytes
    expected = predictor.predict_table(rows.jobs).expected_bytes
    errors = np.abs(expected - labels)
    figures = [
        float(np.median(errors)) / MIB,
        float(np.median(errors / labels)) * 100,
        float(np.mean(expected < labels)),
    ]
    for coverage in COVERAGES:
        safe = predictor.predict_table(rows.jobs, coverage=coverage).safe_bytes
        figures += [float(np.mean(labels <= safe)), float(safe.sum() / labels.sum() - 1)]
    return figures


def drift_table(rows: SiteRows, bundles: Sequence[Bundle], seeds: int) -> None:
    """Print how often drift is detected, by kind of drift and number of jobs."""
    predictor = Predictor(
        bundles, context_bytes=1429 * MIB
    )  # a site whose context the answers hold
    cases: dict[str, Callable[[SiteRows], SiteRows]] = {
        "nothing": lambda drawn: drawn,
        "context 30 MiB larger": lambda drawn: shifted(drawn, 30),
        "context 100 MiB larger": lambda drawn: shifted(drawn, 100),
        "context 100 MiB smaller": lambda drawn: shifted(drawn, -100),
        "every tenth job in bf16": lambda drawn: in_bf16(drawn, 10),
        "every fourth job in bf16": lambda drawn: in_bf16(drawn, 4),
        "batches twice as large, jobs alone": lambda drawn: SiteRows.from_columns(
            drawn.jobs.with_numbers(
                "batch_size", np.minimum(2 * drawn.jobs.column("batch_size"), 1023)
            )
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
                places = random.Random(seed).choices(range(len(rows)), k=count)
                drawn = change(rows.take(np.array(places)))
                drifts += bool(find_drift(drawn, predictor).causes)
            shares.append(f"{drifts} of {seeds}")
        print_line(f"| {name} | " + " | ".join(shares) + " |")


def shifted(rows: SiteRows, shift_mib: int) -> SiteRows:
    """Return the rows with ``shift_mib`` MiB added to their labels."""
    return replace(rows, label_bytes=rows.label_bytes + shift_mib * MIB)


def in_bf16(rows: SiteRows, every: int) -> SiteRows:
    """Return the rows with one job of ``every`` in bf16."""
    jobs = [
        replace(job, precision="bf16") if at % every == 0 else job
        for at, job in enumerate(rows.jobs)
    ]
    return replace(rows, jobs=JobTable.from_jobs(jobs))


def print_line(line: str) -> None:
    """Print a line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
