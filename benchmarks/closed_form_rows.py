"""Rows for calibrating the closed form: traces of ordinary networks.

    python benchmarks/closed_form_rows.py --limits WORK --out real_networks.jsonl.gz

``WORK`` is the folder of a finished ``benchmarks/limits.py --trace``.  Published readings join the
rows when the closed form is calibrated (``python -m research calibrate-closed-form --real-runs``).
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import ordinary_networks


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--limits", type=Path, required=True)
    arguments.add_argument("--out", type=Path, required=True)
    chosen = arguments.parse_args()
    with gzip.GzipFile(chosen.out, "w", mtime=0) as stream:
        stream.writelines(json.dumps(line).encode() + b"\n" for line in _traced(chosen.limits))


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
            "readings": [
                [jobs[network.name]["job"]["batch_size"], traces[network.name]["reserved_bytes"]]
            ],
        }
        for network in ordinary_networks.NETWORKS
        if "job" in jobs[network.name] and "reserved_bytes" in traces.get(network.name, {})
    ]


if __name__ == "__main__":
    main()
