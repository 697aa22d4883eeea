"""Example jobs and requests: the OpenAPI description shows them, and every model must predict them
before it serves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

Document = Mapping[str, Any]


_DOCUMENTS: Final = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
EXAMPLE_JOBS: Final[Mapping[str, Document]] = _DOCUMENTS["jobs"]
"""One small job of every family."""
FIT_EXAMPLES: Final[Mapping[str, Document]] = _DOCUMENTS["fit"]
"""Bodies for ``POST /v1/fit`` by name."""
OBSERVATION_EXAMPLES: Final[Mapping[str, Document]] = _DOCUMENTS["observations"]
"""Bodies for ``POST /v1/observations`` by name."""


def as_totals(job: Document) -> Document:
    """``job`` as totals, as a scheduler describes it that has no layer list."""
    known = {name: value for name, value in job.items() if name != "layers"}
    layers = job["layers"]
    return {
        **known,
        "total_activations": sum(layer["activations"] for layer in layers),
        "total_parameters": sum(layer["parameters"] for layer in layers),
    }


def predict_examples(family: str) -> dict[str, Document]:
    """Bodies for ``POST /v1/predict`` by name."""
    job = EXAMPLE_JOBS[family]
    devices = [
        {"id": "GPU-0", "gpu": "A100", "free_mib": 9000},
        {"id": "MIG-1", "gpu": "A100", "mig": "1g.5gb"},
    ]
    return {
        "layers": {"job": job},
        "totals": {"job": as_totals(job), "bin_width_mib": 2048},
        "fits": {
            "job": job,
            "gpu": "H100",
            "coverage": 0.95,
            "fits": ["T4", "H100/1g.10gb"],
            "devices": devices,
        },
    }


def batch_examples(family: str) -> dict[str, Document]:
    """Bodies for ``POST /v1/predict/batch`` by name; the second job is invalid."""
    job = as_totals(EXAMPLE_JOBS[family])
    jobs = [job, {**job, "batch_size": 0}]
    return {
        "batch": {"jobs": jobs},
        "chosen": {"jobs": jobs, "fields": ["prediction_id", "safe_bytes"]},
    }


def batch_sizes_examples(family: str) -> dict[str, Document]:
    """Bodies for ``POST /v1/batch-sizes`` by name."""
    job = EXAMPLE_JOBS[family]
    return {
        "gpu": {"job": job, "gpu": "A100/1g.5gb", "max_batch": 16},
        "free": {"job": job, "gpu": "A100", "free_mib": 3000, "max_batch": 16},
    }
