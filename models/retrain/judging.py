"""Answers of champion and candidate for jobs that neither was trained on; whole releases answer, as
in the service.

A champion of an earlier retraining was not trained on the held-out architectures, so it answers
itself.  A shipped bundle was trained on all rows of its dataset, which would be data leakage.  For
held-out architectures a stand-in answers in its place: the champion's plan, trained again without
them.  For all other architectures every champion answers itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import InvalidRequestError
from gpumemnet.gpu import device_profile
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.measurement import OBSERVED
from gpumemnet.predict.bundle import Bundle
from gpumemnet.predict.model import NO_NUMBER
from gpumemnet.predict.prediction import PredictionTable
from gpumemnet.predict.predictor import Predictor

from .collect import Row
from .gate import Judged, Rule, Verdict, judge
from .row_splits import HELD_OUT_RULE, TRUST, RowSplit, shift_label, source_of

HELD_OUT: Final = "held-out architectures"
NEWEST: Final = "newest observations"
COVERAGE: Final = 0.99

KnownArchitectures = Callable[[Bundle], Collection[str]]
"""Keys of held-out architectures that a bundle of the champion was nevertheless trained on."""
StandIn = Callable[[Bundle], Bundle]
"""Gives the bundle that answers instead of a champion for held-out architectures."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows on which candidates are judged, of one GPU.

    Attributes:
        name: description of the part.
        rows: the rows, with their labels.
        gpu: the GPU that the release answers for.
        decides: whether an improvement counts here.
        is_held_out: whether they are held-out architectures; else the newest observations.
    """

    name: str
    rows: tuple[Row, ...]
    gpu: str
    decides: bool
    is_held_out: bool


def parts_of(
    split: RowSplit,
    splits: Sequence[RowSplit],
    shifts: dict[str, int],
    file_names: dict[str, str],
    rule: Rule,
) -> list[Part]:
    """The split's own held-out and newest rows, which decide, and rows on which no candidate may be
    worse.

    The latter are the same rows file by file, and the rows of the family's other splits.  Rows that
    were read where the split borrows from are shifted like its training rows.
    """
    parts = [
        Part(HELD_OUT, split.held_out, split.gpu, True, True),
        Part(NEWEST, split.newest, split.gpu, True, False),
    ]
    origins = sorted({row.origin for row in split.held_out})
    for origin in origins if len(origins) > 1 else ():
        rows = tuple(row for row in split.held_out if row.origin == origin)
        parts.append(Part(f"{HELD_OUT} of {file_names[origin]}", rows, split.gpu, False, True))
    for other in splits:
        if other is split or other.family != split.family:
            continue
        description = f"{other.provenance} jobs on {other.gpu}"
        for name, rows, is_held_out in (
            (HELD_OUT, other.held_out, True),
            (NEWEST, other.newest, False),
        ):
            if other.gpu == split.gpu:
                rows = tuple(_shifted(row, shifts, split) for row in rows)
            parts.append(Part(f"{name}, {description}", rows, other.gpu, False, is_held_out))
    return [part for part in parts if len(part.rows) >= rule.fewest_guard_rows]


def _shifted(row: Row, shifts: dict[str, int], split: RowSplit) -> Row:
    shift = shifts.get(source_of(row.measurement))
    return (
        row
        if shift is None
        else replace(row, measurement=shift_label(row.measurement, shift, split))
    )


def judge_candidate(
    candidate: Bundle,
    champion: Sequence[Bundle],
    parts: Sequence[Part],
    known: KnownArchitectures,
    stand_in: StandIn,
    rule: Rule,
) -> Verdict:
    """The gate's verdict on a candidate beside the champion's bundles of the same family and
    encoder.

    Raises:
        ValueError: when a stand-in cannot be trained.
    """
    predictor = Predictor
    cached_predictors: dict[frozenset[str], tuple[Predictor, Predictor]] = {}

    def predictors(informed: frozenset[str]) -> tuple[Predictor, Predictor]:
        if informed not in cached_predictors:
            bundles = [
                stand_in(bundle) if bundle.sha256 in informed else bundle for bundle in champion
            ]
            others = [bundle for bundle in bundles if slot_of(bundle) != slot_of(candidate)]
            cached_predictors[informed] = predictor(bundles), predictor([*others, candidate])
        return cached_predictors[informed]

    judged = []
    for part in parts:
        rows = [
            row
            for row in part.rows
            if row.measurement.label_bytes is not None and _fits_encoder(row, candidate)
        ]
        by_view: dict[frozenset[str], list[Row]] = {}
        for row in rows:
            architecture = row.measurement.architecture_key
            informed = [
                bundle.sha256
                for bundle in champion
                if part.is_held_out and architecture in known(bundle)
            ]
            by_view.setdefault(frozenset(informed), []).append(row)
        if rows:
            judged_groups = [
                _judged(part, group, candidate.card.encoder, *predictors(informed))
                for informed, group in by_view.items()
            ]
            judged.append(_joined(judged_groups))
    return judge(judged, rule)


def _judged(
    part: Part, rows: Sequence[Row], encoder: str, champion: Predictor, candidate: Predictor
) -> Judged:
    measurements = [row.measurement for row in rows]
    return Judged(
        name=part.name,
        decides=part.decides,
        label_bytes=np.array(
            [measurement.label_bytes for measurement in measurements], dtype=np.float64
        ),
        architectures=np.array([measurement.architecture_key for measurement in measurements]),
        champion=_answers(champion, rows, part.gpu, encoder),
        candidate=_answers(candidate, rows, part.gpu, encoder),
    )


def _joined(parts: Sequence[Judged]) -> Judged:
    return replace(
        parts[0],
        label_bytes=np.concatenate([part.label_bytes for part in parts]),
        architectures=np.concatenate([part.architectures for part in parts]),
        champion=np.concatenate([part.champion for part in parts], axis=1),
        candidate=np.concatenate([part.candidate for part in parts], axis=1),
    )


def _answers(
    predictor: Predictor, rows: Sequence[Row], gpu: str, encoder: str
) -> NDArray[np.float64]:
    """Expected and safe bytes, shape ``[2, B]``; a job without safe bytes gets the whole GPU, which
    is also the maximum."""
    gpu_bytes = max(row.measurement.capacity_bytes for row in rows)
    predictions = _predictions(predictor, rows, gpu, encoder)
    safe = np.ma.filled(predictions.safe_bytes.astype(np.float64), gpu_bytes)
    return np.stack((predictions.expected_bytes.astype(np.float64), np.minimum(safe, gpu_bytes)))


def _predictions(
    predictor: Predictor, rows: Sequence[Row], gpu: str, encoder: str
) -> PredictionTable:
    """The networks' own answers, without traced peaks."""
    table = JobTable.from_jobs(
        [replace(row.measurement.job, traced_peak_bytes=None) for row in rows]
    )
    with np.errstate(over="ignore"):
        return predictor.predict_table(
            table, coverage=COVERAGE, gpu=_profiled_gpu(gpu), encoder=encoder
        )


def without_answer(candidate: Bundle, split: RowSplit) -> int:
    """Number of the split's jobs, training jobs included, for which the candidate's answer is not a
    finite number."""
    rows = [
        row
        for row in (*split.training, *split.held_out, *split.newest)
        if _fits_encoder(row, candidate)
    ]
    predictions = _predictions(Predictor([candidate]), rows, split.gpu, candidate.card.encoder)
    return sum(NO_NUMBER in predictions.reasons(row) for row in range(len(rows)))


def _fits_encoder(row: Row, candidate: Bundle) -> bool:
    return row.measurement.job.has_layers or candidate.card.encoder != "transformer"


def _profiled_gpu(gpu: str) -> str | None:
    """The GPU if there is a profile of it, else ``None``, the model's own."""
    try:
        return device_profile(gpu).name
    except InvalidRequestError:
        return None


Slot = tuple[str, str, str]
"""Family, encoder and provenance: a release holds one bundle for each."""


def slot_of(bundle: Bundle) -> Slot:
    """The slot that the bundle fills in a release."""
    return (
        bundle.card.family,
        bundle.card.encoder,
        str(bundle.card.provenance),
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


def known_held_out_architectures(bundle: Bundle, splits: Iterable[RowSplit]) -> frozenset[str]:
    """The held-out architectures that a bundle was nevertheless trained on."""
    if not may_know_held_out(bundle):
        return frozenset()
    known = dataset_hashes(bundle)
    rows = (row for split in splits if split.family == bundle.card.family for row in split.held_out)
    return frozenset(row.measurement.architecture_key for row in rows if row.origin in known)


def missing_comparison_data(
    split: RowSplit,
    champion: Sequence[Bundle],
    splits: Sequence[RowSplit],
    files: Collection[str],
    fewest_rows: int,
) -> str | None:
    """Why a candidate cannot be compared with the champion on the champion's own training data;
    ``None`` if it can.

    A candidate answers in place of every model that is trusted as much or less, so it must be
    tested on the data of all of these. A candidate that is trained on a site's observations needs
    no such test: it answers for jobs like the observed ones.

    Args:
        split: the candidate's.
        champion: the champion's bundles of the candidate's family and encoder.
        splits: all splits of this run.
        files: SHA-256 of the files that this run reads.
        fewest_rows: held-out rows that a test on one model's data needs.
    """
    if split.provenance == OBSERVED:
        return None
    for bundle in champion:
        name, provenance = bundle.card.name, slot_of(bundle)[2]
        if _trust(provenance) < _trust(split.provenance):
            continue
        if provenance == split.provenance and bundle.card.site_calibration is not None:
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
            row for other in splits if other.family == split.family for row in other.held_out
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
