"""What a prediction costs in process, on one core: ``python benchmarks/in_process.py``.

Prints the median and the 99th percentile of one prediction over many different jobs, its parts, the feature vector as a loop and
as arrays, batches, and the time from a fresh interpreter to the first prediction.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

CORE = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {CORE})

import numpy as np  # noqa: E402 - after the process is pinned

from gpumemnet import Layer, Predictor, TrainingJob, job_to_json  # noqa: E402
from gpumemnet.feature_row import feature_row  # noqa: E402
from gpumemnet.features import FEATURE_NAMES, feature_columns  # noqa: E402

JOBS = 2000
COLD = """
import sys, time
begin = time.perf_counter()
import gpumemnet
job = gpumemnet.job_from_json(sys.stdin.read())
gpumemnet.Predictor.default().predict(job)
print(time.perf_counter() - begin)
"""


def random_jobs(count: int) -> list[TrainingJob]:
    """MLP jobs of 7 to 31 layers inside the shipped bundle's support, seeded."""
    generator = random.Random(0)
    jobs = []
    for _ in range(count):
        width = inputs = generator.randint(64, 4096)
        layers = []
        for _ in range(generator.randint(2, 10)):
            following = generator.randint(32, 2048)
            layers += [Layer("linear", following, (width + 1) * following), Layer("relu", following), Layer("dropout", following)]
            width = following
        layers.append(Layer("linear", 10, (width + 1) * 10))
        jobs.append(
            TrainingJob(
                family="mlp",
                batch_size=generator.randint(4, 1000),
                input_elements=inputs,
                optimizer="adam",
                precision="fp32",
                layers=tuple(layers),
            )
        )
    return jobs


def microseconds(run: Callable[[TrainingJob], object], jobs: list[TrainingJob]) -> tuple[float, float]:
    """Median and 99th percentile over ``jobs``, the better of three rounds."""
    rounds = []
    for _ in range(3):
        times = []
        for job in jobs:
            begin = time.perf_counter()
            run(job)
            times.append(1e6 * (time.perf_counter() - begin))
        rounds.append((statistics.median(times), float(np.percentile(times, 99))))
    return min(rounds)


def deep_transformer(batch_size: int) -> TrainingJob:
    """A transformer of about 100 layers."""
    width, length = 512, 256
    block = [("layer_norm", width, 2 * width), *([("linear", width, width * width)] * 3), ("attention", width, 0)]
    block += [("linear", width, width * width), ("add", width, 0), ("layer_norm", width, 2 * width)]
    block += [
        ("linear", 4 * width, 4 * width * width),
        ("gelu", 4 * width, 0),
        ("linear", width, 4 * width * width),
        ("add", width, 0),
    ]
    layers = [("embedding", width, 30_000 * width), *(8 * block), ("linear", 30_000, 30_000 * width)]
    return TrainingJob(
        family="transformer",
        batch_size=batch_size,
        input_elements=length,
        optimizer="adamw",
        precision="amp_bf16",
        sequence_length=length,
        attention_kernel="flash",
        layers=tuple(Layer(kind, elements * length, parameters) for kind, elements, parameters in layers),
    )


def main() -> None:
    """Measure and print the table."""
    predictor = Predictor.default()
    jobs = random_jobs(JOBS)
    [model, *_] = predictor.models_for(jobs[0])
    workspace = model.card.blas_workspace_bytes
    rows = {id(job): np.array([feature_row(job, workspace)]) for job in jobs}
    deep = [deep_transformer(job.batch_size % 64 + 1) for job in jobs[:500]]
    print(f"one core, {JOBS} different MLP jobs of 7 to 31 layers, {len(FEATURE_NAMES)} features")
    print(f"{'':44}{'median µs':>12}{'p99 µs':>12}")
    for name, run in (
        ("one prediction, probabilities of all bins", predictor.predict),
        ("  of which: feature vector, plain floats", lambda job: feature_row(job, workspace)),
        ("  of which: graph in onnxruntime", lambda job: model.run((job,), rows[id(job)])),
        ("feature vector of one job, arrays", lambda job: feature_columns((job,), workspace)),
    ):
        median, p99 = microseconds(run, jobs)
        print(f"{name:44}{median:12.0f}{p99:12.0f}")
    for encoder in ("mlp", "transformer"):
        median, p99 = microseconds(lambda job, encoder=encoder: predictor.predict(job, encoder=encoder), deep)
        print(f"{f'one transformer of {len(deep[0].layers)} layers, {encoder}-based':44}{median:12.0f}{p99:12.0f}")
    begin = time.perf_counter()
    predictor.estimate(deep * 2, encoder="transformer")
    print(f"{'the same, 1,000 in one call, per job':44}{1e6 * (time.perf_counter() - begin) / 1000:12.0f}")
    for size in (10, 100, 1000):
        begin = time.perf_counter()
        for start in range(0, JOBS, size):
            predictor.estimate(jobs[start : start + size])
        print(f"{f'batches of {size}, per job':44}{1e6 * (time.perf_counter() - begin) / JOBS:12.0f}")
    cold = [
        float(
            subprocess.run(
                [sys.executable, "-c", COLD], input=job_to_json(jobs[0]), capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(5)
    ]
    print(f"{'import and first prediction, fresh process':44}{1e3 * statistics.median(cold):10.0f} ms")


if __name__ == "__main__":
    main()
