"""Which ordinary networks get a limit through ``extract`` as documented, from which encoder, and
whether it covers what the trace says.

    python benchmarks/limits.py --work /tmp/limits [--trace] [--only resnet50] [--gpu A100-40GB]

Every network of ``ordinary_networks.py`` is extracted, written as a job's JSON, read again and
predicted.  With ``--trace`` it is traced too.  The last table asks for each encoder by name, and
with totals only, and adds MLPs of totals.  Jobs and traces are kept in the work folder, one
line each, so that a second run continues where the first stopped; predictions are made anew.  Needs
torchvision, timm and transformers in addition to torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ordinary_networks import NETWORKS, Network

import gpumemnet
from gpumemnet.extract import ExtractOptions, extract_job
from gpumemnet.extract.placement import placement
from gpumemnet.job.json_codec import job_from_dict, job_to_dict
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.prediction import Prediction
from gpumemnet.predict.predictor import Predictor
from gpumemnet.units import MIB, ceil_mib

_REASON_WIDTH = 90
MLPS = [
    TrainingJob(
        family="mlp",
        batch_size=batch_size,
        input_elements=width,
        optimizer=optimizer,
        precision="fp32",
        total_activations=depth * width + 10,
        total_parameters=depth * width * (width + 1) + 10 * (width + 1),
    )
    for width in (256, 1_024, 4_096, 8_192, 16_384)
    for depth, batch_size, optimizer in ((2, 32, "sgd"), (4, 256, "adam"), (8, 2_048, "adamw"))
    for batch_size in (batch_size, 4 * batch_size)
]
"""30 MLPs of which totals are known alone."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--work", type=Path, required=True, help="folder of the jobs and traces")
    arguments.add_argument(
        "--trace", action="store_true", help="trace networks that have no trace yet"
    )
    arguments.add_argument("--only", default="", help="networks whose name contains this")
    arguments.add_argument("--gpu", default="A100-40GB")
    chosen = arguments.parse_args()
    chosen.work.mkdir(parents=True, exist_ok=True)
    networks = [network for network in NETWORKS if chosen.only in network.name]
    jobs = _kept(chosen.work / "jobs.jsonl", networks, _extracted)
    traces = _kept(
        chosen.work / "traces.jsonl",
        networks if chosen.trace else [],
        lambda network: _traced(network, chosen.gpu),
    )
    predictor = Predictor.default()
    print("| network | request | limit | traced | limit / traced | extract, s | why no limit |")
    print("|---|--:|--:|--:|--:|--:|---|")
    limits, ratios, errors, uncovered = 0, [], [], []
    for network in networks:
        extracted, traced = jobs[network.name], traces.get(network.name, {})
        if "error" in extracted:
            print(f"| {network.name} | | | | | | {extracted['error'][:_REASON_WIDTH]} |")
            continue
        answer = predictor.predict(job_from_dict(extracted["job"]), gpu=chosen.gpu)
        limits += answer.safe_bytes is not None
        reserved = traced.get("expected_bytes")
        if reserved is not None:
            errors.append(abs(answer.expected_bytes / reserved - 1.0))
            if answer.safe_bytes is not None:
                ratios.append(answer.safe_bytes / reserved)
                if answer.safe_bytes < reserved:
                    uncovered.append(network.name)
        print(_row(network, answer, reserved, extracted["seconds"]))
    _print_by_encoder(
        [job_from_dict(one["job"]) for one in jobs.values() if "job" in one], predictor, chosen.gpu
    )
    print(f"\n{limits} of {len(networks)} networks get a limit ({limits / len(networks):.0%}).")
    if ratios:
        print(
            f"Of {len(ratios)} limits, {len(uncovered)} lie below the trace's answer ({', '.join(uncovered) or 'none'}); "
            f"the median limit is {statistics.median(ratios):.2f} times it."
        )
        print(
            f"The request differs from the trace's answer by {statistics.median(errors):.1%} in the median."
        )


def _print_by_encoder(jobs: Sequence[TrainingJob], predictor: Predictor, gpu: str) -> None:
    """Print which encoder answers, by default and by name, how many jobs have a limit, and the
    limit over the request in the median of each family."""
    totals = [replace(job, layers=()) for job in jobs]
    print(
        "\n| asked | jobs | answered by | with a limit | limit / request, CNNs | transformers | MLPs |",
        "|---|--:|---|--:|--:|--:|--:|",
        sep="\n",
    )
    for asked, asked_jobs, encoder in (
        ("by default", [*jobs, *MLPS], None),
        ("`mlp`", [*jobs, *MLPS], "mlp"),
        ("`transformer`", jobs, "transformer"),
        ("totals only", [*totals, *MLPS], None),
    ):
        answers = predictor.predict_many(asked_jobs, gpu=gpu, encoder=encoder)
        models = Counter(answer.estimator for answer in answers)
        named = ", ".join(f"{name} {count}" for name, count in models.items())
        limited = [
            (job.family, answer.safe_bytes / answer.expected_bytes)
            for job, answer in zip(asked_jobs, answers, strict=True)
            if answer.safe_bytes is not None
        ]
        medians = [
            f"{statistics.median(own):.2f}"
            if (own := [ratio for family, ratio in limited if family == one])
            else ""
            for one in ("cnn", "transformer", "mlp")
        ]
        share = f"{len(limited)} ({len(limited) / len(asked_jobs):.0%})"
        print(f"| {asked} | {len(asked_jobs)} | {named} | {share} | {' | '.join(medians)} |")


def _row(network: Network, answer: Prediction, traced: int | None, seconds: float) -> str:
    limit = "" if answer.safe_bytes is None else f"{ceil_mib(answer.safe_bytes):,}"
    truth = "" if traced is None else f"{traced / MIB:,.0f}"
    ratio = (
        "" if traced is None or answer.safe_bytes is None else f"{answer.safe_bytes / traced:.2f}"
    )
    reason = "" if answer.safe_bytes is not None else "; ".join(answer.reasons)[:_REASON_WIDTH]
    return f"| {network.name} | {ceil_mib(answer.expected_bytes):,} | {limit} | {truth} | {ratio} | {seconds:.1f} | {reason} |"


def _kept(
    path: Path, networks: list[Network], make: Callable[[Network], dict[str, Any]]
) -> dict[str, Any]:
    """The results in ``path`` by name, after those that are missing have been made and written."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = {entry["name"]: entry for entry in map(json.loads, lines)}
    for network in networks:
        if network.name in found:
            continue
        start = time.perf_counter()
        try:
            result = make(network)
        except Exception as error:  # one network that does not build must not end the run
            result = {"error": f"{type(error).__name__}: {error}"}
        found[network.name] = {
            "name": network.name,
            "seconds": time.perf_counter() - start,
            **result,
        }
        with path.open("a") as stream:
            stream.write(json.dumps(found[network.name]) + "\n")
    return found


def _extracted(network: Network) -> dict[str, Any]:
    with placement():
        model, inputs = network.make(network.batch_size)
    options = ExtractOptions(optimizer=network.optimizer, precision=network.precision)
    extraction = extract_job(model, inputs, options)
    return {"job": job_to_dict(extraction.job), "notes": extraction.notes}


def _traced(network: Network, gpu: str) -> dict[str, Any]:
    with placement():
        model, inputs = network.make(network.batch_size)
    answer = gpumemnet.trace(
        model,
        inputs,
        optimizer=network.optimizer,
        precision=network.precision,
        gpu=gpu,
    )
    return {
        "expected_bytes": answer.expected_bytes,
        "reserved_bytes": answer.reserved_bytes,
        "gpu": answer.gpu,
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
