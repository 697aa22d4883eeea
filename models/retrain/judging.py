"""Answers of champion and candidate for jobs that neither was trained on; whole releases answer, as
in the service.

Observations are asked as the service would be asked about them.  Readings of others hold the CUDA
context of another driver, so there the context in the readings is stated to both.

A champion of an earlier retraining was not trained on the held-out architectures, so it answers
itself.  A bundle that was trained on all rows of its datasets, as a shipped one, would have an
unfair advantage there: its errors on rows that it knows are 2 to 6 % smaller.  For these rows a
stand-in answers in its place: the same training without them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from gpumemnet.atomic_files import Document
from gpumemnet.gpu import MAX_CONTEXT_MIB, known_profile
from gpumemnet.job.job_table import Array, Flags
from gpumemnet.predict.bundle import Bundle
from gpumemnet.predict.prediction import OF_THE_SITE
from gpumemnet.predict.predictor import NO_NUMBER, Predictor
from gpumemnet.units import MIB

from ..training.data import LabelledJobs
from .collect import HELD_OUT_RULE, Collected
from .gate import Judged

HELD_OUT: Final = "held-out architectures"
NEWEST: Final = "newest observations"

Release = Sequence[Bundle]


def judged_parts(
    candidate: Release,
    encoder: str,
    champion: Release,
    stand_ins: Callable[[], Release],
    collected: Collected,
) -> list[Judged]:
    """The answers of both releases, asked for one encoder, in the parts that the gate judges.

    The held-out architectures of the files that are new to the champion decide, or those of all
    files where none is new; and so do the newest observations.  Every source and every family is a
    part of its own, on which the candidate may not be worse.  Sampled networks that nobody has run
    are trained on and not judged, as bounds are not calibrated on them either.

    Args:
        candidate, champion: the releases.
        encoder: the encoder that is asked for.
        stand_ins: gives the release that answers for the champion on rows that it knows.
        collected: the rows.

    Raises:
        ValueError: when the candidate's answer is no finite number.
    """
    [own_champion], [own_candidate] = (
        [bundle for bundle in release if bundle.card.encoder == encoder]
        for release in (champion, candidate)
    )
    known = {*own_champion.card.families} & {*own_candidate.card.families}
    families = collected.data.jobs.option_column("family")
    is_judged = ~collected.is_training & collected.data.is_measured & np.isin(families, [*known])
    is_judged &= collected.data.calibrates
    if encoder == "transformer":
        is_judged &= collected.data.jobs.layer_counts > 0
    rows = np.flatnonzero(is_judged)
    if not len(rows):
        return []
    data, is_newest = collected.data.take(rows), collected.is_newest[rows]
    is_new = ~is_newest & ~np.isin(data.sources, known_files([own_champion], collected.data))
    labels, candidate_answers = answers(candidate, encoder, data)
    champion_answers = np.empty_like(candidate_answers)
    by_stand_in = ~is_new & ~is_newest & may_know_held_out(own_champion)
    for own in (~by_stand_in, by_stand_in):
        if own.any():
            release = stand_ins() if own is by_stand_in else champion
            champion_answers[:, own] = answers(release, encoder, data.take(own))[1]
    is_deciding = is_new if is_new.any() else ~is_newest
    parts: list[tuple[str, bool, Flags]] = [
        (HELD_OUT, True, is_deciding),
        (NEWEST, True, is_newest),
    ]
    families = families[rows]
    for names, kind in ((data.sources, "of"), (families, "of family")):
        for name in dict.fromkeys(names.tolist()):
            parts.append((f"{HELD_OUT} {kind} {name}", False, ~is_newest & (names == name)))
    for family in dict.fromkeys(families.tolist()):
        parts.append((f"{NEWEST} of family {family}", False, is_newest & (families == family)))
    found: dict[bytes, Judged] = {}
    for name, decides, own in parts:
        if own.any():
            found.setdefault(
                own.tobytes(),
                Judged(
                    f"{encoder}, {name}",
                    decides,
                    labels[own],
                    data.groups[own],
                    champion_answers[:, own],
                    candidate_answers[:, own],
                ),
            )
    return [*found.values()]


def answers(release: Release, encoder: str, data: LabelledJobs) -> tuple[Array, Array]:
    """What each job took, shape ``[B]``; expected and safe bytes of its answer, shape ``[2, B]``.

    A job without safe bytes gets the whole GPU, which is also the maximum.  Traced peaks are left
    out, so that the networks answer.

    Raises:
        ValueError: when an answer is no finite number.
    """
    labels, found = np.empty(len(data)), np.empty((2, len(data)))
    as_trained = [
        replace(bundle, card=replace(bundle.card, site_calibration=None)) for bundle in release
    ]
    jobs = data.jobs.with_numbers("traced_peak_bytes", np.zeros(len(data)))
    kinds = [*zip(data.sources.tolist(), data.gpus.tolist(), strict=True)]
    is_of_site = np.isin(data.provenances, OF_THE_SITE)
    for kind in dict.fromkeys(kinds):
        own = np.flatnonzero([one == kind for one in kinds])
        contexts = data.context_bytes[own]
        if is_of_site[own].all():
            predictor = Predictor(release)
        else:
            stated = int(np.clip(np.median(contexts), 1, MAX_CONTEXT_MIB * MIB))
            contexts = np.full(len(own), float(stated))
            predictor = Predictor(as_trained, context_bytes=stated)
        labels[own] = data.label_bytes[own] + contexts
        profile = known_profile(kind[1])
        gpu = profile.name if profile else None  # the release's own
        with np.errstate(over="ignore"):
            table = predictor.predict_table(jobs.take(own), gpu=gpu, encoder=encoder)
        if count := sum(NO_NUMBER in table.reasons(row) for row in range(len(own))):
            raise ValueError(f"its answer is no finite number for {count} of the jobs")
        capacity = predictor.prediction_gpu(gpu).capacity_bytes
        safe = np.ma.filled(table.safe_bytes.astype(np.float64), capacity)
        found[:, own] = table.expected_bytes, np.minimum(safe, capacity)
    return labels, found


def dataset_hashes(bundle: Bundle) -> tuple[str, ...]:
    """SHA-256 of each dataset that the bundle was trained on; exports of observations do not
    count."""
    if (record := bundle.card.document.get("retraining")) is not None:
        return tuple(record["datasets"])
    sources = bundle.card.document["training_data"]["sources"]
    return tuple(source["sha256"] for source in sources.values())


def known_files(release: Release, data: LabelledJobs) -> list[str]:
    """Names of the files that a release was trained on."""
    known = {sha256 for bundle in release for sha256 in dataset_hashes(bundle)}
    return [name for name, sha256 in data.files.items() if sha256 in known]


def may_know_held_out(bundle: Bundle) -> bool:
    """Whether a bundle may have been trained on held-out architectures."""
    record: Document = bundle.card.document.get("retraining") or {}
    return record.get("held_out") != HELD_OUT_RULE


def newest_training_observation(release: Iterable[Bundle]) -> float | None:
    """Time of the newest observation that the bundles were trained on."""
    records = [bundle.card.document.get("retraining") or {} for bundle in release]
    times = [record["learned_until"] for record in records if record.get("learned_until")]
    return max(times, default=None)


def missing_comparison_data(
    champion: Release, collected: Collected, files: Collection[str]
) -> str | None:
    """Why a candidate cannot be compared with the champion on all that it answers for; ``None`` if
    it can.

    Args:
        champion: the champion's bundles of the encoders that are trained.
        collected: the rows.
        files: SHA-256 of the files that this run reads.
    """
    for bundle in champion:
        name = bundle.card.name
        if bundle.card.site_calibration is not None and not collected.is_observed.any():
            return (
                f"the champion's model {name} is calibrated to a site, and a new one would not be: retrain from the site's "
                "observations, or calibrate a new model and put it into the registry by hand"
            )
        for sha256 in dataset_hashes(bundle):
            if sha256 not in files:
                return (
                    f"the champion's model {name} was trained on a dataset that is not among the files (sha256 {sha256[:12]}…): "
                    "a new model cannot be tested for regressions without it; add it with --dataset"
                )
        families = collected.data.jobs.option_column("family")
        learned = {*families[collected.is_training].tolist()}
        if lost := [family for family in bundle.card.families if family not in learned]:
            return f"no row of {', '.join(lost)} jobs is left to train on, for which the champion's model {name} answers"
    return None
