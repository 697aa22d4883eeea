"""Writes a prediction as a JSON object: the fields that HTTP and ``--json`` have in common; HTTP adds its own.

``request_mib`` and ``limit_mib`` are for schedulers: the expected and the safe bytes in MiB, rounded up.
"""

from __future__ import annotations

from typing import Any

from gpumemnet.predict.prediction import Prediction
from gpumemnet.units import ceil_mib


def answer_document(prediction: Prediction) -> dict[str, Any]:
    """Returns one prediction as a JSON object."""
    index = prediction.bin_index
    lower_bytes, upper_bytes = prediction.bins.bounds_bytes(index)
    probabilities = prediction.probabilities.tolist()
    safe_bytes = prediction.safe_bytes
    return {
        "request_mib": ceil_mib(prediction.expected_bytes),
        "limit_mib": None if safe_bytes is None else ceil_mib(safe_bytes),
        "expected_bytes": prediction.expected_bytes,
        "safe_bytes": safe_bytes,
        "coverage": prediction.coverage,
        "in_support": prediction.in_support,
        "reasons": list(prediction.reasons),
        "bin": {
            "index": index,
            "lower_bytes": lower_bytes,
            "upper_bytes": upper_bytes,
            "probability": probabilities[index],
        },
        "bins": {
            "name": prediction.bins.name,
            "width_bytes": prediction.bins.width_bytes,
            "count": prediction.bins.count,
            "probabilities": probabilities,
        },
        "gpu": prediction.gpu,
        "label_source": prediction.label_source,
        "model": {"name": prediction.estimator, "version": prediction.version},
    }
