"""Checks that the champion's training data is available for regression tests.

A model from an earlier retraining names its datasets in its card, and was not trained on the
held-out architectures.  Any other model, such as a shipped bundle, was trained on all rows of its
dataset.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from gpumemnet.job.measurement import OBSERVED
from gpumemnet.predict.bundle import Bundle
from gpumemnet.predict.predictor import TRUST

from .holdout import HELD_OUT_RULE
from .tracks import Track

Slot = tuple[str, str, str]
"""Family, encoder and provenance: a release holds one bundle for each."""


def slot_of(bundle: Bundle) -> Slot:
    """The slot that the bundle fills in a release."""
    return (
        bundle.card.family,
        bundle.card.encoder,
        str(bundle.card.document["training_data"].get("provenance")),
    )


def data_hash(bundle: Bundle) -> str:
    """SHA-256 of the dataset of a bundle that no retraining made."""
    return str(bundle.card.document["training_data"].get("sha256"))


def dataset_hashes(bundle: Bundle) -> tuple[str, ...]:
    """SHA-256 of each dataset that the bundle was trained on; exports of observations do not
    count."""
    record = _retraining_record(bundle)
    return (data_hash(bundle),) if record is None else tuple(map(str, record.get("origins", ())))


def may_know_held_out(bundle: Bundle) -> bool:
    """Whether a bundle may have been trained on held-out architectures."""
    record = _retraining_record(bundle)
    return record is None or record.get("held_out") != HELD_OUT_RULE


def newest_training_observation(bundles: Iterable[Bundle]) -> dict[str, float]:
    """Time of the newest observation that the bundles of each family were trained on."""
    until: dict[str, float] = {}
    for bundle in bundles:
        newest = (_retraining_record(bundle) or {}).get("learned_until")
        if isinstance(newest, int | float):
            until[bundle.card.family] = max(until.get(bundle.card.family, newest), newest)
    return until


def known_held_out_architectures(bundle: Bundle, tracks: Iterable[Track]) -> frozenset[str]:
    """The held-out architectures that a bundle was nevertheless trained on."""
    if not may_know_held_out(bundle):
        return frozenset()
    known = dataset_hashes(bundle)
    rows = (row for track in tracks if track.family == bundle.card.family for row in track.held_out)
    return frozenset(row.measurement.architecture_key for row in rows if row.origin in known)


def missing_comparison_data(
    track: Track,
    champion: Sequence[Bundle],
    tracks: Sequence[Track],
    files: Collection[str],
    fewest_rows: int,
) -> str | None:
    """Why a candidate cannot be compared with the champion on the champion's own training data;
    ``None`` if it can.

    A candidate answers in place of every model that is trusted as much or less, so it must be
    tested on the data of all of these. A candidate that is trained on a site's observations needs
    no such test: it answers for jobs like the observed ones.

    Args:
        track: the candidate's.
        champion: the champion's bundles of the candidate's family and encoder.
        tracks: all tracks of this run.
        files: SHA-256 of the files that this run reads.
        fewest_rows: held-out rows that a test on one model's data needs.
    """
    if track.provenance == OBSERVED:
        return None
    for bundle in champion:
        name, provenance = bundle.card.name, slot_of(bundle)[2]
        if _trust(provenance) < _trust(track.provenance):
            continue
        if provenance == track.provenance and bundle.card.site_calibration is not None:
            return (
                f"the champion's model {name} is calibrated to a site, and a new one would not be: retrain from the site's "
                "observations, or calibrate a new model and put it into the registry by hand"
            )
        for origin in dataset_hashes(bundle):
            if origin not in files:
                return (
                    f"the champion's model {name} was trained on a dataset that is not among the files (sha256 {origin[:12]}…): "
                    "a new model cannot be tested for regressions without it; add it with --dataset"
                )
        if not dataset_hashes(bundle):
            continue
        held_out = [
            row for other in tracks if other.family == track.family for row in other.held_out
        ]
        count = sum(row.origin in dataset_hashes(bundle) for row in held_out)
        if count < fewest_rows:
            return (
                f"{count} rows are held out of the data of the champion's model {name}, and a regression test needs "
                f"{fewest_rows}: put a model with more rows into the registry by hand"
            )
    return None


def _retraining_record(bundle: Bundle) -> Mapping[str, Any] | None:
    record = bundle.card.document.get("retraining")
    return record if isinstance(record, dict) else None


def _trust(provenance: str) -> int:
    return TRUST.index(provenance) if provenance in TRUST else len(TRUST)
