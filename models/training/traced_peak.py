"""How measured memory lies around a traced peak: what a bundle needs to answer jobs that schedulers have traced.

The expected bytes are the traced reserved bytes with the CUDA context of the labels, shifted by their median error; the bound is
the conformal quantile of the ratio of label and expectation over rows that fit nothing else (split conformal prediction: it holds
for jobs like those rows, which is why their options stand in the card).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .data import LabelledJobs

CENTRAL_WEIGHT: Final = 0.9
_CENTRAL_SHARE: Final = 0.5
_TAIL_SHARE: Final = 0.95


@dataclass(frozen=True, slots=True)
class TracedPeakFit:
    """The fit, as :class:`gpumemnet.predict.bundle.TracedPeakCalibration` has it, and on what it rests.

    Attributes:
        context_bytes: of the labels.
        weights, log_scales, log_shift: of the mixture.
        log_bounds: for each coverage.
        rows: how many rows it rests on.
    """

    context_bytes: int
    weights: tuple[float, ...]
    log_scales: tuple[float, ...]
    log_shift: float
    log_bounds: tuple[float, ...]
    rows: int


def fit_traced_peak(data: LabelledJobs, coverages: Sequence[float]) -> TracedPeakFit | None:
    """The fit on the rows of ``data`` that have a label and a traced peak; ``None`` where these are too few for a coverage."""
    traced = np.array([job.traced_peak_bytes or 0 for job in data.jobs], dtype=np.float64)
    known = (traced > 0) & ~np.isnan(data.label_bytes)
    if data.context_bytes is None or not known.any():
        return None
    errors = np.sort(np.log(data.label_bytes[known] / (traced[known] + data.context_bytes)))
    ranks = [math.ceil((len(errors) + 1) * level) - 1 for level in coverages]
    if ranks[-1] >= len(errors):
        # Too few rows for the highest coverages: the largest error seen, with as much again, is all that can be said.
        errors = np.append(errors, [2.0 * errors[-1]] * (ranks[-1] - len(errors) + 1))
    shift = float(np.median(errors))
    distances = np.abs(errors - shift)
    # a logistic of scale s has half of its mass within s log 3 of the centre, and 95 % within s log 39
    central = max(float(np.quantile(distances, _CENTRAL_SHARE)) / math.log(3.0), 1e-4)
    tail = max(float(np.quantile(distances, _TAIL_SHARE)) / math.log(39.0), 2.0 * central)
    return TracedPeakFit(
        context_bytes=data.context_bytes,
        weights=(CENTRAL_WEIGHT, 1.0 - CENTRAL_WEIGHT),
        log_scales=(central, 3.0 * tail),
        log_shift=shift,
        log_bounds=tuple(float(errors[rank]) for rank in ranks),
        rows=int(known.sum()),
    )


def traced_peak_card(fit: TracedPeakFit, data: LabelledJobs, options: dict[str, list[Any]]) -> dict[str, Any]:
    """The fit as it stands in a card, with the rows that it rests on."""
    return {
        "weights": list(fit.weights),
        "log_scales": list(fit.log_scales),
        "log_shift": fit.log_shift,
        "log_bounds": list(fit.log_bounds),
        "options": options,
        "rows": fit.rows,
        "gpu": data.gpu,
        "provenance": data.provenance,
        "label_source": data.label_source,
        "method": "measured memory over the traced peak with the CUDA context: its median, two logistics, conformal quantiles",
    }
