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
PREDICT_EXAMPLES: Final[Mapping[str, Document]] = _DOCUMENTS["predict"]
"""Bodies for ``POST /v1/predict`` by name."""
BATCH_EXAMPLES: Final[Mapping[str, Document]] = _DOCUMENTS["batch"]
"""Bodies for ``POST /v1/predict/batch`` by name; the second job is invalid."""
BATCH_SIZES_EXAMPLES: Final[Mapping[str, Document]] = _DOCUMENTS["batch_sizes"]
"""Bodies for ``POST /v1/batch-sizes`` by name."""
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
