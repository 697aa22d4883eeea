"""The results of a site's calibration: cards of bundles, and a JSON document."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict
from pathlib import Path
from typing import Final

from gpumemnet.atomic_files import Document
from gpumemnet.predict.bundle import Bundle
from gpumemnet.site.calibration import Calibration, ModelCalibration

GUARANTEE: Final = (
    "At each coverage with a multiple, a new job on this GPU that lies in the support and is expected to fit stays within its "
    "safe bytes with at least that probability, on average over what the calibration might have drawn, provided that new jobs "
    "are exchangeable with those calibrated on: drawn alike, as from the same users and software. Where a multiple is null there "
    "were too few jobs: the bound is the shipped one, shifted, or the largest error seen at the site where that is larger, and "
    "nothing is guaranteed. The same holds for jobs that send a traced peak, whose bounds are shifted only."
)
METHOD: Final = (
    "shift: median of what jobs took less what the graph says, weighted by one over the job's spread, on a third of the jobs; "
    "multiples: split conformal quantiles, with the finite-sample correction, of the errors in units of the spread, on the "
    "others; runs of one job count once, by the largest reading; a job that ran out of memory counts as an infinite error"
)
CONTEXT_METHOD: Final = (
    "the context of the site's GPU, from other models' jobs or from probes; no bounds"
)
NO_GUARANTEE: Final = "none: bounds as shipped, with room for the context's uncertainty and growth"


def calibrated_cards(calibration: Calibration) -> list[tuple[Bundle, Document]]:
    """Each bundle with its calibrated card and the same graph.

    The version gets the first digits of a hash over files and calibration.
    """
    cards = []
    for model in calibration.models:
        bundle, site = model.bundle, _site_document(calibration, model)
        base = str(bundle.card.document["version"]).partition("+site.")[0]
        digest = hashlib.sha256(
            repr((sorted(calibration.files.values()), sorted(site.items()))).encode()
        ).hexdigest()[:8]
        document = {**bundle.card.document, "site_calibration": site}
        cards.append((bundle, {**document, "version": f"{base}+site.{digest}"}))
    return cards


def calibration_document(calibration: Calibration) -> Document:
    """All figures for programs; amounts in bytes."""
    one = calibration
    names = ("gpu", "label_source", "jobs", "left_out", "files", "first", "last")
    return {
        **{name: getattr(one, name) for name in names},
        "context_bytes": asdict(one.context),
        "is_context_read": one.is_context_read,
        "guarantee": GUARANTEE,
        "models": [
            {"name": model.bundle.card.name, **_site_document(calibration, model)}
            for model in one.models
        ],
    }


def _site_document(calibration: Calibration, model: ModelCalibration) -> Document:
    card = model.bundle.card
    judged = {"before": model.before, "after": model.after}
    return {
        **asdict(model.site),
        "coverages": list(card.coverages),
        "is_own": model.is_own,
        "shift_interval_bytes": [math.floor(model.shift.low), math.ceil(model.shift.high)],
        "shift_confidence": round(model.shift.confidence, 4),
        "jobs": model.jobs,
        "fit_jobs": model.fit_jobs,
        "calibration_jobs": model.calibration_jobs,
        "context_bytes": round(calibration.context.value),
        "label_source": calibration.label_source,
        "first": calibration.first,
        "last": calibration.last,
        "files": [
            {"name": Path(name).name, "sha256": sha256}
            for name, sha256 in calibration.files.items()
        ],
        "base": {
            "version": str(card.version).partition("+site.")[0],
            "sha256": model.bundle.sha256,
        },
        "method": METHOD if model.is_own else CONTEXT_METHOD,
        "guarantee": GUARANTEE if model.is_own else NO_GUARANTEE,
        "cross_validated": {name: one and asdict(one) for name, one in judged.items()},
    }
