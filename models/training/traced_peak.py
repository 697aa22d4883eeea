"""Calibrates traced peaks against measured memory, so that a bundle can answer jobs with a traced
peak.

The expected bytes are the traced reserved bytes plus the CUDA context of the labels, shifted by the
median error.  The bound is the conformal quantile of the ratio of label and expectation over rows
that are not used to fit anything else (split conformal prediction).  It holds for jobs like those
rows, so the card lists their options.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .bounds import conformal_bounds, has_enough_rows
from .data import LabelledJobs

CENTRAL_WEIGHT: Final = 0.9
_CENTRAL_SHARE: Final = 0.5
_TAIL_SHARE: Final = 0.95


@dataclass(frozen=True, slots=True)
class TracedPeakFit:
    """The fit, as in :class:`gpumemnet.predict.bundle_card.TracedPeakCalibration`, and its number
    of rows.

    Attributes:
        context_bytes: CUDA context of the labels.
        weights, log_scales, log_shift: parameters of the mixture.
        log_bounds: logarithm of the ratio of bound and traced memory with context, for each
            coverage.
        rows: number of rows that it was fitted to.
    """

    context_bytes: int
    weights: tuple[float, ...]
    log_scales: tuple[float, ...]
    log_shift: float
    log_bounds: tuple[float, ...]
    rows: int


def fit_traced_peak(data: LabelledJobs, coverages: Sequence[float]) -> TracedPeakFit | None:
    """Fit the rows of ``data`` that have a label and a traced peak.

    Returns:
        The fit; ``None`` if there is no such row, or the CUDA context of the labels is not known.
    """
    traced = data.jobs.column("traced_peak_bytes")
    known = (traced > 0) & ~np.isnan(data.label_bytes)
    if data.context_bytes is None or not known.any():
        return None
    errors = np.log(data.label_bytes[known] / (traced[known] + data.context_bytes))
    bounds = conformal_bounds(
        errors, coverages, least=0.0
    )  # twice a negative error would lie below it
    if not has_enough_rows(len(errors), coverages[-1]):
        errors = np.append(errors, bounds[-1])  # the mixture is fitted to the doubled error, too
    shift = float(np.median(errors))
    distances = np.abs(errors - shift)
    # a logistic of scale s has half of its mass within s log 3 of the centre, and 95 % within s log
    # 39
    central = max(float(np.quantile(distances, _CENTRAL_SHARE)) / math.log(3.0), 1e-4)
    tail = max(float(np.quantile(distances, _TAIL_SHARE)) / math.log(39.0), 2.0 * central)
    return TracedPeakFit(
        context_bytes=data.context_bytes,
        weights=(CENTRAL_WEIGHT, 1.0 - CENTRAL_WEIGHT),
        log_scales=(central, 3.0 * tail),
        log_shift=shift,
        log_bounds=bounds,
        rows=int(known.sum()),
    )


def traced_peak_card(
    fit: TracedPeakFit, data: LabelledJobs, options: dict[str, list[Any]]
) -> dict[str, Any]:
    """Return the fit as an entry of a card, with the rows that it was fitted to."""
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
