"""A dataset of ordinary networks, traced.

    python benchmarks/closed_form_rows.py --limits WORK --out traced_ordinary_networks.parquet

``WORK`` is the folder of a finished ``benchmarks/limits.py --trace``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import ordinary_networks

from gpumemnet.gpu import context, device_profile
from gpumemnet.job.dataset import write_dataset
from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.job.measurement import TRACED, Measurement

GPU = "A100-40GB"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--limits", type=Path, required=True)
    arguments.add_argument("--out", type=Path, required=True)
    chosen = arguments.parse_args()
    write_dataset(chosen.out, _traced(chosen.limits))


def _traced(work: Path) -> Iterator[Measurement]:
    device = device_profile(GPU)
    context_bytes = context(device).expected_bytes
    jobs, traces = (
        {entry["name"]: entry for entry in map(json.loads, (work / name).read_text().splitlines())}
        for name in ("jobs.jsonl", "traces.jsonl")
    )
    for network in ordinary_networks.NETWORKS:
        reserved = traces.get(network.name, {}).get("reserved_bytes")
        if "job" in jobs[network.name] and reserved is not None:
            yield Measurement(
                job=job_from_dict(jobs[network.name]["job"]),
                status="ok",
                label_source=TRACED,
                capacity_bytes=device.capacity_bytes,
                provenance=TRACED,
                gpu=device.name,
                recipe="real",
                architecture=json.dumps({"model": network.name}),
                architecture_family=network.kind,
                label_state="steady",
                peak_process_bytes=reserved + context_bytes,
                peak_reserved_bytes=reserved,
                context_bytes=context_bytes,
            )


if __name__ == "__main__":
    main()
