"""Rows for calibrating the closed form: traces of ordinary networks, and published readings of timm models on an A100.

    python benchmarks/closed_form_rows.py --limits WORK --readings published_timm_a100.csv --out real_networks.jsonl.gz

``WORK`` is the folder of a finished ``benchmarks/limits.py --trace``.  The readings are those of GPUMemNet's repository
(``Related_works/FakeTensor/fake_tensor.xlsx``, CC BY 4.0): fp32, SGD with momentum, ``cudnn.benchmark`` on.  They hold one
constant, :data:`CONTEXT_MIB`.  A reading is taken to have caught the search of algorithms, and is left out, when it exceeds one
and a half times what FakeTensor counts for forward and backward pass plus the momentum.  Two models of each of timm's modules are
read.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import ordinary_networks
import torch

from gpumemnet.errors import ExtractError
from gpumemnet.extract import ExtractOptions, extract_job
from gpumemnet.extract.placement import placement
from gpumemnet.job.json_codec import job_to_dict
from gpumemnet.units import MIB

CONTEXT_MIB = 1850
"""Between traced reserved bytes and the readings lies one constant of 1,800 to 1,890 MiB: an older driver loads all kernels."""
CAUGHT_SEARCH = 1.5
MODELS_PER_MODULE = 2
SPACING = 6
"""The first and the second of six parts of a module's models, by name: they are not neighbours."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--limits", type=Path, required=True)
    arguments.add_argument("--readings", type=Path, required=True)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--jobs", type=Path, help="jobs of timm models that are extracted already; new ones are added")
    chosen = arguments.parse_args()
    lines = [*_traced(chosen.limits), *_measured(chosen.readings, chosen.jobs or chosen.out.with_suffix(".jobs"))]
    with gzip.GzipFile(chosen.out, "w", mtime=0) as stream:
        stream.writelines(json.dumps(line).encode() + b"\n" for line in lines)


def _traced(work: Path) -> list[dict[str, Any]]:
    jobs, traces = (
        {entry["name"]: entry for entry in map(json.loads, (work / name).read_text().splitlines())}
        for name in ("jobs.jsonl", "traces.jsonl")
    )
    return [
        {
            "name": network.name,
            "kind": network.kind,
            "source": "traced",
            "job": jobs[network.name]["job"],
            "readings": [[jobs[network.name]["job"]["batch_size"], traces[network.name]["reserved_bytes"]]],
        }
        for network in ordinary_networks.NETWORKS
        if "job" in jobs[network.name] and "reserved_bytes" in traces.get(network.name, {})
    ]


def _measured(readings: Path, kept: Path) -> list[dict[str, Any]]:
    import timm
    from timm.models import model_entrypoint

    of_model = defaultdict(list)
    with readings.open() as stream:
        for row in csv.DictReader(stream):
            if row["usable"] == "yes" and timm.is_model(row["model"]):
                of_model[row["model"]].append(row)
    of_module = defaultdict(list)
    for name in sorted(of_model):
        of_module[model_entrypoint(name).__module__.rpartition(".")[2]].append(name)
    extracted = {entry["name"]: entry for entry in map(json.loads, kept.read_text().splitlines())} if kept.exists() else {}
    lines = []
    for module, names in of_module.items():
        for name in names[:: max(1, len(names) // SPACING)][:MODELS_PER_MODULE]:
            if name not in extracted:
                extracted[name] = {"name": name, **_extracted(name, of_model[name][0]["input"])}
                with kept.open("a") as stream:
                    stream.write(json.dumps(extracted[name]) + "\n")
            if (job := extracted[name].get("job")) is None:
                continue
            momentum = 4 * sum(parameters for _, _, parameters in _layers(job)) / MIB
            kinds = {
                int(row["batch_size"]): float(row["measured_mib"]) - CONTEXT_MIB
                for row in of_model[name]
                if float(row["measured_mib"]) - CONTEXT_MIB <= CAUGHT_SEARCH * (float(row["faketensor_mib"]) + momentum)
            }
            above = [[size, round(mib * MIB)] for size, mib in kinds.items() if mib > 0]
            if above:
                lines.append({"name": f"timm/{name}", "kind": module, "source": "measured", "job": job, "readings": above})
    return lines


def _layers(job: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(layer["kind"], layer["activations"], layer["parameters"]) for layer in job["layers"]]


def _extracted(name: str, shape: str) -> dict[str, Any]:
    import timm

    try:
        with placement():
            model = timm.create_model(name)
        images = torch.empty(8, *map(int, shape.split("x")), device="meta")
        options = ExtractOptions(optimizer="sgd_momentum", precision="fp32", cudnn_benchmark=True)
        return {"job": job_to_dict(extract_job(model, images, options).job)}
    except ExtractError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
