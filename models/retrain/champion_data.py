"""What the champion's models have learnt, and whether that is at hand: without it nobody can say what a new model has forgotten.

A champion of an earlier retraining says so in its card, and has left the held-out architectures out.  Any other, as the shipped
bundles, has learnt from all rows of its dataset, those too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from gpumemnet.data.measurement import OBSERVED
from gpumemnet.predict.bundle import Bundle
from gpumemnet.predict.predictor import TRUST

from .holdout import HELD_OUT_RULE
from .tracks import Track

Slot = tuple[str, str, str]
"""Family, encoder and provenance: what a release holds one bundle for."""


def slot_of(bundle: Bundle) -> Slot:
    """What a release holds the bundle for."""
    return bundle.card.family, bundle.card.encoder, str(bundle.card.document["training_data"].get("provenance"))


def data_hash(bundle: Bundle) -> str:
    """SHA-256 of the dataset that a bundle learnt from, where it was not made by a retraining."""
    return str(bundle.card.document["training_data"].get("sha256"))


def origins(bundle: Bundle) -> tuple[str, ...]:
    """SHA-256 of each dataset that the bundle learnt from; exports of observations are none."""
    said = _retraining(bundle)
    return (data_hash(bundle),) if said is None else tuple(map(str, said.get("origins", ())))


def may_have_seen(bundle: Bundle) -> bool:
    """Whether a bundle may have learnt from held-out architectures."""
    said = _retraining(bundle)
    return said is None or said.get("held_out") != HELD_OUT_RULE


def learnt_until(bundles: Iterable[Bundle]) -> dict[str, float]:
    """Family → time of the newest observation that one of the bundles has learnt from."""
    until: dict[str, float] = {}
    for bundle in bundles:
        learnt = (_retraining(bundle) or {}).get("learnt_until")
        if isinstance(learnt, int | float):
            until[bundle.card.family] = max(until.get(bundle.card.family, learnt), learnt)
    return until


def held_out_but_learnt(bundle: Bundle, tracks: Iterable[Track]) -> frozenset[str]:
    """The held-out architectures that a bundle has learnt from all the same."""
    if not may_have_seen(bundle):
        return frozenset()
    known = origins(bundle)
    rows = (row for track in tracks if track.family == bundle.card.family for row in track.held_out)
    return frozenset(row.measurement.architecture_key for row in rows if row.origin in known)


def lacking(
    track: Track, champion: Sequence[Bundle], tracks: Sequence[Track], files: Collection[str], fewest_rows: int
) -> str | None:
    """Why no candidate of a track can be compared with the champion on the champion's own ground; ``None`` when it can.

    A candidate is asked before every model that is trusted no more than it is, and so takes jobs from all of these.  One of a
    site's observations needs no such ground: it answers for jobs like those, and what it forgets of others is asked for where the
    datasets are among the files.

    Args:
        track: the candidate's.
        champion: the champion's bundles of its family and encoder.
        tracks: all of them.
        files: SHA-256 of the files at hand.
        fewest_rows: held-out rows of what a model learnt from that can stand against a candidate.
    """
    if track.provenance == OBSERVED:
        return None
    for bundle in champion:
        name, provenance = bundle.card.name, slot_of(bundle)[2]
        if _trust(provenance) < _trust(track.provenance):
            continue
        if provenance == track.provenance and bundle.card.site_calibration is not None:
            return (
                f"the champion's model {name} is calibrated to a site, which a new one would not be: retrain from the site's "
                "observations, or calibrate a new model and put it into the registry by hand"
            )
        for origin in origins(bundle):
            if origin not in files:
                return (
                    f"the champion's model {name} learnt from a dataset that is not among the files (sha256 {origin[:12]}…): "
                    "without it nobody can say what a new model has forgotten; give it with --dataset"
                )
        if not origins(bundle):
            continue
        held_out = [row for other in tracks if other.family == track.family for row in other.held_out]
        count = sum(row.origin in origins(bundle) for row in held_out)
        if count < fewest_rows:
            return (
                f"{count} rows are held out of what the champion's model {name} learnt from, and {fewest_rows} are needed to see "
                "what a new model has forgotten: put one with more rows into the registry by hand"
            )
    return None


def _retraining(bundle: Bundle) -> Mapping[str, Any] | None:
    said = bundle.card.document.get("retraining")
    return said if isinstance(said, dict) else None


def _trust(provenance: str) -> int:
    return TRUST.index(provenance) if provenance in TRUST else len(TRUST)
