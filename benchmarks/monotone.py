"""How often the request or the limit falls as the batch grows.

    python benchmarks/monotone.py [--gpu A100-40GB] [--count 60]

Jobs are sampled ones of every family, published ones, and traced jobs of real architectures, evenly
drawn from the committed datasets.  Each is asked at the batch sizes 1, 2, 3 … 8, and from there in
steps of an eighth up to 1,024.  A step falls where an amount is below that of the smaller batch
size; steps to or from a job without a limit do not count for the limit.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from gpumemnet.job.dataset import read_dataset
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.predictor import Predictor

DATASETS = Path(__file__).parents[1] / "dataset_builder" / "datasets"
FILES = {
    "sampled": ("traced_mlp_h200", "traced_cnn_h200", "traced_transformer_h200"),
    "published": ("published_mlp_a100", "published_cnn_a100", "published_transformer_a100"),
    "real": ("real_runs/traced_real_jobs",),
}
LARGEST = 1_024
TOLERANCE = 1e-4
"""Relative; smaller falls are rounding."""


def batch_sizes() -> list[int]:
    """Return the batch sizes of a sweep."""
    sizes = list(range(1, 9))
    while sizes[-1] < LARGEST:
        sizes.append(sizes[-1] + max(1, sizes[-1] // 8))
    return sizes


def jobs(count: int) -> Iterator[tuple[str, TrainingJob]]:
    """Yield ``count`` jobs of each source, with its name."""
    for source, names in FILES.items():
        for name in names:
            rows = read_dataset(DATASETS / f"{name}.parquet")
            for place in np.linspace(0, len(rows) - 1, count // len(names)).astype(int).tolist():
                yield source, replace(rows[place].job, traced_peak_bytes=None)


def main() -> None:
    """Print the counts, and the worst steps."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--gpu", default="A100-40GB")
    arguments.add_argument("--count", type=int, default=60, help="number of jobs of each source")
    chosen = arguments.parse_args()
    predictor, sizes = Predictor.default(), batch_sizes()
    steps: Counter[tuple[str, str]] = Counter()
    falls: Counter[tuple[str, str]] = Counter()
    worst = []
    for source, job in jobs(chosen.count):
        answers = predictor.predict_many(
            [replace(job, batch_size=size) for size in sizes], gpu=chosen.gpu
        )
        for size, smaller, larger in zip(sizes, answers, list(answers)[1:], strict=False):
            pairs = {
                "request": (smaller.expected_bytes, larger.expected_bytes),
                "limit": (smaller.safe_bytes, larger.safe_bytes),
            }
            for amount, (before, after) in pairs.items():
                if before is None or after is None:
                    continue
                steps[source, amount] += 1
                if after < before * (1.0 - TOLERANCE):
                    falls[source, amount] += 1
                    worst.append(
                        (
                            after / before - 1.0,
                            source,
                            amount,
                            size,
                            job.family,
                            smaller.estimator,
                            larger.estimator,
                        )
                    )
    print("| jobs | amount | steps | falls |\n|---|---|--:|--:|")
    for source, amount in steps:
        print(f"| {source} | {amount} | {steps[source, amount]:,} | {falls[source, amount]:,} |")
    print(
        "\n| change | jobs | amount | from batch size | family | from model | to model |\n|--:|---|---|--:|---|---|---|"
    )
    for change, *rest in sorted(worst)[:10]:
        print(f"| {change:.1%} | {' | '.join(map(str, rest))} |")


if __name__ == "__main__":
    main()
