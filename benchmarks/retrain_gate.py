"""Measures how often the gate of retraining errs: ``python benchmarks/retrain_gate.py``.

Each run is seeded.  It has a champion that was trained on few of the published MLP readings, a file
of further readings, and 600 held-out readings.  Twenty runs corrupt the further readings: a wrong
unit, swapped columns, a missing family, a shifted context.
Twenty runs have valid new data: more readings, or observations of a site whose driver has a smaller
context.  A promoted model is
worse in two cases.  Its mean error on the held-out readings is larger than the champion's, or
significantly more of them exceed its safe bytes.  Each run appends its figures to a file, and
finished runs in that file are skipped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from gpumemnet.job.dataset import read_dataset, write_dataset
from gpumemnet.job.layers import Layer
from gpumemnet.job.measurement import OBSERVED, Measurement
from gpumemnet.predict.bundle import Bundle, load_bundle
from gpumemnet.predict.conformal import binomial_tail
from gpumemnet.site.releases import Registry
from gpumemnet.units import MIB
from models.retrain.gate import losses
from models.retrain.judging import answers
from models.retrain.pipeline import code_hash, content_hash, retrain
from models.retrain.release import Request
from models.training.card import save_classifier
from models.training.classifier import plan_of, train
from models.training.data import LabelledJobs, labelled_jobs, load_labelled_jobs

Run = dict[str, Any]
DATASETS = Path(__file__).resolve().parents[1] / "dataset_builder" / "datasets"
PUBLISHED = DATASETS / "published_mlp_a100.parquet"
BASE, NEW, UNSEEN = 150, 500, 600
EPOCHS = 20
MB_FOR_MIB = 1000**2 / 1024**2
FIGURES = ("error", "above safe", "waste")
VALID = ("more readings", "site's observations")
CORRUPTIONS = ("units", "swapped columns", "family missing", "shifted context")


def relabelled(one: Measurement, label_bytes: float) -> Measurement:
    return replace(one, peak_device_bytes=max(1, round(label_bytes)))


def corrupted(kind: str, rows: Sequence[Measurement], seed: int) -> list[Measurement]:
    """Return the further readings of one run, with all rows or every second row corrupted,
    depending on the seed."""
    variant = seed % 5
    step = 1 if variant in (0, 3) else 2
    if kind == "family missing":
        return list(read_dataset(DATASETS / "published_transformer_a100.parquet")) + list(
            rows[: 3 * (variant % 2)]
        )
    out = list(rows)
    for index in range(0, len(rows), step):
        one, label = rows[index], float(rows[index].label_bytes or 0)
        if kind == "units":
            factor = (MB_FOR_MIB, MB_FOR_MIB, 1000 / 1024, 1 / 1024, 1 / MB_FOR_MIB)[variant]
            out[index] = relabelled(one, label * factor)
        elif kind == "swapped columns":
            out[index] = swapped(one, rows[(index + 1) % len(rows)], variant)
        else:
            out[index] = relabelled(one, label + (-900, 500, -300, 900, 200)[variant] * MIB)
    return out


def swapped(one: Measurement, other: Measurement, variant: int) -> Measurement:
    """Return a row with swapped values: batch and input, activations and parameters, or its label
    and another row's."""
    job = one.job
    if variant in (0, 1):
        return replace(
            one, job=replace(job, batch_size=job.input_elements, input_elements=job.batch_size)
        )
    if variant in (2, 3):
        return relabelled(one, float(other.label_bytes or 0))
    layers = tuple(
        Layer(layer.kind, max(1, layer.parameters), layer.activations) for layer in job.layers
    )
    totals = dict.fromkeys(("total_activations", "total_parameters", "trainable_parameters"))
    return replace(one, job=replace(job, layers=layers, **totals), architecture_key="")


def observed(rows: Sequence[Measurement], shift_bytes: int) -> list[Measurement]:
    """Return the readings as observations of a site with a different driver, one per hour."""
    found = []
    for index, one in enumerate(rows):
        options = json.dumps({"observation": str(index), "observed_at": 1.76e9 + 3600.0 * index})
        label = float(one.label_bytes or 0) + shift_bytes
        row = replace(
            relabelled(one, label),
            provenance=OBSERVED,
            recipe="observations",
            architecture="{}",
            options=options,
        )
        found.append(replace(row, job=replace(row.job, traced_peak_bytes=None)))
    return found


def first_champion(folder: Path, base: Path, seed: int) -> Registry:
    """Create a registry whose champion was trained on all of ``base``, and has no other bundle."""
    data = load_labelled_jobs([base])
    trained = train(data, plan_of("mlp", seed, EPOCHS))
    first = save_classifier(folder / "first", trained, data, name="mlp", version="first")
    registry = Registry(folder / "registry")
    registry.create_release("first", [first.source], parent=None)
    registry.set_champion("first", by="benchmark", reason="")
    return registry


def figures(bundles: Sequence[Bundle], unseen: LabelledJobs) -> tuple[float, int, float]:
    """Return mean error in log-bytes, number of jobs above their safe bytes, and mean waste, as the
    gate computes them."""
    loss = losses(*answers(bundles, "mlp", unseen))
    return float(loss["error"].mean()), int(loss["above safe"].sum()), float(loss["waste"].mean())


def is_worse(before: tuple[float, int, float], after: tuple[float, int, float], count: int) -> bool:
    """Whether the mean error is larger, or significantly more jobs than before exceed their safe
    bytes."""
    return after[0] > before[0] or (
        after[1] > before[1] and binomial_tail(after[1], count, 0.01) < 0.01
    )


def run(folder: Path, kind: str, seed: int, published: Sequence[Measurement]) -> Run:
    start, cpu_start = time.monotonic(), time.process_time()
    order = np.random.default_rng([seed, len(kind)]).permutation(len(published))
    drawn = [published[index] for index in order[: BASE + NEW + UNSEEN]]
    base, new, unseen = drawn[:BASE], drawn[BASE : BASE + NEW], drawn[BASE + NEW :]
    shift = 0
    observations: tuple[Path, ...] = ()
    datasets = [folder / "base.parquet", folder / "new.parquet"]
    write_dataset(datasets[0], base)
    if kind == "site's observations":
        shift = -(400 + 40 * (seed % 10)) * MIB
        write_dataset(datasets.pop(), observed(new, shift))
        observations = (folder / "new.parquet",)
        unseen = observed(unseen, shift)
    else:
        write_dataset(datasets[1], new if kind == "more readings" else corrupted(kind, new, seed))
    if kind == "family missing":
        datasets.pop(0)
    registry = first_champion(folder, folder / "base.parquet", seed)
    request = Request(
        datasets=tuple(datasets),
        observations=observations,
        registry=registry.folder,
        work=folder / "work",
        encoders=("mlp",),
        seed=seed,
        epochs=EPOCHS,
    )
    outcome = retrain(request)
    document = outcome.document
    first, champion = registry.load("first"), registry.load(registry.aliases().champion)
    # the bundles that the gate judged, whether promoted or not
    candidates = [load_bundle(request.work / one["folder"]) for one in document["candidates"]]
    asked = labelled_jobs(unseen, "unseen")
    assert asked is not None
    before, after, offered = (
        figures(bundles, asked) for bundles in (first, champion, candidates or first)
    )
    reasons = [*document["reasons"], *(refused["reason"] for refused in document["refused"])]
    return {
        "kind": kind,
        "seed": seed,
        "promoted": {one.sha256 for one in first} != {one.sha256 for one in champion},
        "exit_code": outcome.exit_code,
        "worse": is_worse(before, after, UNSEEN),
        "offered_better": bool(candidates)
        and offered != before
        and not is_worse(before, offered, UNSEEN),
        "offered": offered,
        "error": [before[0], after[0]],
        "above safe": [before[1] / UNSEEN, after[1] / UNSEEN],
        "waste": [before[2], after[2]],
        "seconds": time.monotonic() - start,
        "cpu_seconds": time.process_time() - cpu_start,
        "reason": reasons[0] if reasons else "",
        "reasons": reasons,
        "parts": document["parts"],
    }


def settings() -> dict[str, object]:
    """Return the settings of a run besides kind and seed; a finished run is reused only if all of
    them are equal."""
    code = content_hash(code_hash(), Path(__file__).read_text("utf-8"))
    data = hashlib.sha256(PUBLISHED.read_bytes()).hexdigest()
    return {"rows": [BASE, NEW, UNSEEN], "epochs": EPOCHS, "data": data[:12], "code": code[:12]}


def read_finished_runs(path: Path, current: dict[str, object]) -> dict[tuple[str, int], Run]:
    """Return the runs in ``path`` with these settings; incomplete lines of a killed run are
    skipped."""
    runs: dict[tuple[str, int], Run] = {}
    for line in path.read_text("utf-8").splitlines() if path.is_file() else ():
        try:
            result = json.loads(line)
        except ValueError:
            continue
        if result["settings"] == current:
            runs[result["kind"], result["seed"]] = result
    return runs


def describe_run(result: Run) -> str:
    changes = [f"{name} {result[name][0]:.2%} -> {result[name][1]:.2%}" for name in FIGURES]
    outcome = "promoted" if result["promoted"] else "not promoted"
    outcome += ", WORSE" if result["promoted"] and result["worse"] else ""
    outcome += ", though better" if result["offered_better"] and not result["promoted"] else ""
    seconds = f"{result['cpu_seconds']:.0f} s of CPU"
    return f"{result['kind']} {result['seed']}: {outcome}; {', '.join(changes)}; {seconds}; {result['reason']}"


def table(runs: Iterable[Run]) -> str:
    by_kind: dict[str, list[Run]] = {}
    for result in runs:
        by_kind.setdefault(result["kind"], []).append(result)
    headings = (
        "new data",
        "runs",
        "better candidates",
        "promoted",
        "promoted and worse",
        *(f"{name}: before → after" for name in FIGURES),
    )
    lines = [f"| {' | '.join(headings)} |", f"| --- |{' ---: |' * (len(headings) - 1)}"]
    for kind, group in by_kind.items():
        promoted = sum(bool(result["promoted"]) for result in group)
        worse = sum(bool(result["promoted"] and result["worse"]) for result in group)
        means = [
            " → ".join(
                f"{np.mean([result[name][side] for result in group]):.2%}" for side in (0, 1)
            )
            for name in FIGURES
        ]
        better = sum(bool(result["offered_better"]) for result in group)
        lines.append(
            f"| {kind} | {len(group)} | {better} | {promoted} | {worse} | {' | '.join(means)} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--seeds",
        type=int,
        default=5,
        help="runs of each corruption; twice as many of each valid kind",
    )
    parser.add_argument(
        "--kinds", nargs="*", default=[*CORRUPTIONS, *VALID], choices=[*CORRUPTIONS, *VALID]
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/retrain_gate.jsonl"),
        help="file to which each run appends its figures",
    )
    arguments = parser.parse_args()
    published = [one for one in read_dataset(PUBLISHED) if one.status == "ok"]
    current = settings()
    results = read_finished_runs(arguments.out, current)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    # run all kinds for each seed in turn, so that partial results cover every kind
    planned = [
        (kind, seed)
        for turn in range(arguments.seeds)
        for kind in arguments.kinds
        for seed in ((turn,) if kind in CORRUPTIONS else (2 * turn, 2 * turn + 1))
    ]
    for index, (kind, seed) in enumerate(planned, start=1):
        if (kind, seed) not in results:
            with tempfile.TemporaryDirectory() as folder:
                results[kind, seed] = run(Path(folder), kind, seed, published) | {
                    "settings": current
                }
            with arguments.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(results[kind, seed]) + "\n")
        print(
            f"{index} of {len(planned)}: {describe_run(results[kind, seed])}",
            file=sys.stderr,
            flush=True,
        )
    print(
        table(
            results[one] for one in sorted(planned, key=lambda one: arguments.kinds.index(one[0]))
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
