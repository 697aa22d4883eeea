"""Measures the cost of predictions in process on one core: ``python benchmarks/in_process.py``.

Prints these figures:

- median and 99th percentile of one prediction over many different jobs, and of its parts;
- batches, and requests from the bytes received to the bytes of the answer;
- memory of a process with all bundles loaded;
- time from the start of an interpreter to its first prediction.
"""

from __future__ import annotations

import json
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
import orjson  # noqa: E402

from gpumemnet import Layer, Prediction, Predictor, TrainingJob, job_to_json  # noqa: E402
from gpumemnet.job.job_table import JobTable  # noqa: E402
from gpumemnet.job.json_codec import job_from_json  # noqa: E402
from gpumemnet.physics.closed_form import IS_COMPILED  # noqa: E402
from gpumemnet.predict.features import FEATURE_NAMES, model_features  # noqa: E402
from service.api.examples import EXAMPLE_JOBS  # noqa: E402
from service.api.predictions import PredictionApi  # noqa: E402

JOBS = 2000
REPEATS = 15
COLD = """
import sys, time
begin = time.perf_counter()
import gpumemnet
job = gpumemnet.job_from_json(sys.stdin.read())
gpumemnet.Predictor.default().predict(job)
print(time.perf_counter() - begin)
"""
MEMORY = """
import gpumemnet
job = gpumemnet.job_from_json(open(0).read())
predictor = gpumemnet.Predictor.default()
for encoder in ("mlp", "transformer"):
    list(predictor.predict_many([job] * 1000, encoder=encoder))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS")))
"""


def random_jobs(count: int) -> list[TrainingJob]:
    """Return seeded MLP jobs of 7 to 31 layers within the shipped bundle's support."""
    generator = random.Random(0)
    jobs = []
    for _ in range(count):
        width = inputs = generator.randint(64, 4096)
        layers = []
        for _ in range(generator.randint(2, 10)):
            following = generator.randint(32, 2048)
            layers += [
                Layer("linear", following, (width + 1) * following),
                Layer("relu", following),
                Layer("dropout", following),
            ]
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


def microseconds(
    run: Callable[[TrainingJob], object], jobs: list[TrainingJob]
) -> tuple[float, float]:
    """Return median and 99th percentile over ``jobs`` in microseconds, for the best of three
    rounds."""
    rounds = []
    for _ in range(3):
        times = []
        for job in jobs:
            begin = time.perf_counter()
            run(job)
            times.append(1e6 * (time.perf_counter() - begin))
        rounds.append((statistics.median(times), float(np.percentile(times, 99))))
    return min(rounds)


def milliseconds(run: Callable[[], object]) -> float:
    """Return the median of several runs in milliseconds."""
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def run_in_fresh_process(code: str, job: TrainingJob) -> float:
    """Run ``code`` in a new interpreter with the job's JSON; return the number that it prints."""
    ended = subprocess.run(
        [sys.executable, "-c", code],
        input=job_to_json(job),
        capture_output=True,
        text=True,
        check=True,
    )
    return float(ended.stdout)


def deep_transformer(batch_size: int) -> TrainingJob:
    """Return a transformer of about 100 layers."""
    width, length = 512, 256
    block = [
        ("layer_norm", width, 2 * width),
        *([("linear", width, width * width)] * 3),
        ("attention", width, 0),
    ]
    block += [("linear", width, width * width), ("add", width, 0), ("layer_norm", width, 2 * width)]
    block += [
        ("linear", 4 * width, 4 * width * width),
        ("gelu", 4 * width, 0),
        ("linear", width, 4 * width * width),
        ("add", width, 0),
    ]
    layers = [
        ("embedding", width, 30_000 * width),
        *(8 * block),
        ("linear", 30_000, 30_000 * width),
    ]
    return TrainingJob(
        family="transformer",
        batch_size=batch_size,
        input_elements=length,
        optimizer="adamw",
        precision="amp_bf16",
        sequence_length=length,
        attention_kernel="flash",
        layers=tuple(
            Layer(kind, elements * length, parameters) for kind, elements, parameters in layers
        ),
    )


def main() -> None:
    """Measure and print the table."""
    predictor = Predictor.default()

    def list_all(jobs: list[TrainingJob], encoder: str | None = None) -> list[Prediction]:
        return list(predictor.predict_many(jobs, encoder=encoder))

    jobs = random_jobs(JOBS)
    model = predictor.model()
    workspace = predictor.prediction_gpu(None).blas_workspace_bytes
    tables = {id(job): JobTable.from_jobs((job,)) for job in jobs}
    rows = {id(job): model_features(JobTable.from_jobs((job,)), workspace) for job in jobs}
    deep = [deep_transformer(job.batch_size % 64 + 1) for job in jobs[:500]]
    form = "compiled" if IS_COMPILED else "not compiled"
    print(
        f"one core, {JOBS} different MLP jobs of 7 to 31 layers, {len(FEATURE_NAMES)} features, closed form {form}"
    )
    print(f"{'':44}{'median µs':>12}{'p99 µs':>12}")
    for name, run in (
        ("one prediction, probabilities of all bins", predictor.predict),
        (
            "  of which: feature vector",
            lambda job: model_features(JobTable.from_jobs((job,)), workspace),
        ),
        ("  of which: graph in onnxruntime", lambda job: model.run(tables[id(job)], rows[id(job)])),
    ):
        median, p99 = microseconds(run, jobs)
        print(f"{name:44}{median:12.0f}{p99:12.0f}")
    for encoder in ("mlp", "transformer"):
        median, p99 = microseconds(
            lambda job, encoder=encoder: predictor.predict(job, encoder=encoder), deep
        )
        print(
            f"{f'one transformer of {len(deep[0].layers)} layers, {encoder}-based':44}{median:12.0f}{p99:12.0f}"
        )
    print(f"{'':44}{'median ms':>12}")
    for name, action in (
        ("1,000 different MLP jobs in one call", lambda: list_all(jobs[:1000])),
        (
            "  of which: feature vectors",
            lambda: model_features(JobTable.from_jobs(jobs[:1000]), workspace),
        ),
        ("1,000 transformers, MLP-based", lambda: list_all(deep * 2)),
        (
            "1,000 transformers, transformer-based",
            lambda: list_all(deep * 2, encoder="transformer"),
        ),
        (
            "ten calls of 100 MLP jobs",
            lambda: [list_all(jobs[at : at + 100]) for at in range(0, 1000, 100)],
        ),
        (
            "hundred calls of 10 MLP jobs",
            lambda: [list_all(jobs[at : at + 10]) for at in range(0, 1000, 10)],
        ),
    ):
        print(f"{name:44}{milliseconds(action):12.1f}")
    example = EXAMPLE_JOBS["mlp"]
    api = PredictionApi(predictor)
    text, request_body = json.dumps(example).encode(), json.dumps({"job": example}).encode()
    batch = json.dumps({"jobs": [example] * 1000}).encode()
    for name, action in (
        (
            "1,000 times: job of 5 layers from its JSON",
            lambda: [job_from_json(text) for _ in range(1000)],
        ),
        (
            "1,000 requests, bytes to bytes",
            lambda: [orjson.dumps(api.predict(request_body)) for _ in range(1000)],
        ),
        (
            "one request of 1,000 jobs, bytes to bytes",
            lambda: orjson.dumps(api.predict_batch(batch)),
        ),
    ):
        print(f"{name:44}{milliseconds(action):12.1f}")
    cold = statistics.median(run_in_fresh_process(COLD, jobs[0]) for _ in range(5))
    print(f"{'import and first prediction, fresh process':44}{1e3 * cold:12.1f}")
    print(
        f"{'memory with all bundles, after both encoders':44}{run_in_fresh_process(MEMORY, jobs[0]) / 1024:8.0f} MiB"
    )


if __name__ == "__main__":
    main()
