"""The JSON of predictions, one by one and by the thousand.

One function says what an answer holds.  For many answers of a model it is written once with gaps, and each answer fills them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson

from gpumemnet.gpu.fits import Fit
from gpumemnet.predict.bins import BinScheme
from gpumemnet.predict.prediction import Prediction
from gpumemnet.units import MIB, ceil_mib

MARGIN: Final = "conformal"
"""Name of the margin between request and limit: split conformal prediction, by which bundles calibrate their bounds."""

_LARGEST_PLAIN_INTEGER: Final = 2**63 - 1


def one_prediction(identity: str, estimate: Prediction, found: Sequence[Fit] | None, ending: bytes) -> bytes:
    """The answer that ``estimate`` is.

    Args:
        identity: its id.
        estimate: what was predicted.
        found: what the job fits, where that was asked.
        ending: the last members, and the closing brace.
    """
    index = estimate.bin_index
    request_mib = ceil_mib(estimate.expected_bytes)
    limit_mib = None if estimate.safe_bytes is None else ceil_mib(estimate.safe_bytes)
    document = _document(
        identity=identity,
        bin={**_bin(estimate.bins, index), "probability": float(estimate.probabilities[index])},
        request_mib=integer(request_mib),
        limit_mib=limit_mib,
        margin_mib=None if limit_mib is None else limit_mib - request_mib,
        expected_bytes=integer(estimate.expected_bytes),
        safe_bytes=estimate.safe_bytes,
        coverage=estimate.coverage,
        reasons=estimate.reasons,
        bins=estimate.bins,
        probabilities=estimate.probabilities,
    )
    if found is not None:
        document["fits"] = [fit_document(fit) for fit in found]
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)[:-1] + ending


def _bin(bins: BinScheme, index: int) -> dict[str, int | None]:
    lower_bytes, upper_bytes = bins.bounds_bytes(index)
    return {
        "index": index,
        "lower_bytes": lower_bytes,
        "upper_bytes": upper_bytes,
        "lower_mib": lower_bytes // MIB,
        "upper_mib": None if upper_bytes is None else upper_bytes // MIB,
    }


def fit_document(fit: Fit) -> dict[str, Any]:
    """One verdict as an answer holds it."""
    return {
        "gpu": fit.gpu,
        "mig": fit.mig,
        "device": fit.device,
        "available_mib": fit.available_mib,
        "request_mib": integer(fit.request_mib),
        "limit_mib": fit.limit_mib,
        "verdict": fit.verdict,
        "probability": fit.probability,
    }


def integer(number: int) -> int | orjson.Fragment:
    """``number`` for orjson, which stops at 64 bits; far outside the support the closed form does not."""
    return number if number <= _LARGEST_PLAIN_INTEGER else orjson.Fragment(str(number))


def _document(
    *,
    identity: object,
    bin: object,
    request_mib: object,
    limit_mib: object,
    margin_mib: object,
    expected_bytes: object,
    safe_bytes: object,
    coverage: float,
    reasons: object,
    bins: BinScheme,
    probabilities: object,
) -> dict[str, Any]:
    """What an answer holds, in the order in which it is written; ``limit_mib`` is ``None`` outside the support."""
    return {
        "prediction_id": identity,
        "bin": bin,
        "request_mib": request_mib,
        "limit_mib": limit_mib,
        "margin": None if limit_mib is None else {"name": MARGIN, "coverage": coverage, "mib": margin_mib},
        "expected_bytes": expected_bytes,
        "expected_mib": request_mib,
        "safe_bytes": safe_bytes,
        "safe_mib": limit_mib,
        "coverage": coverage,
        "in_support": limit_mib is not None,
        "reasons": reasons,
        "bins": {
            "name": bins.name,
            "width_bytes": bins.width_bytes,
            "width_mib": bins.width_bytes // MIB,
            "count": bins.count,
            "probabilities": probabilities,
        },
    }
