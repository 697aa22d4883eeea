"""Calibrates models to a site without retraining: the CUDA context and the bounds, from a few
probes or some fifty observations.

A site differs from the machine that a model learned on mostly by the CUDA context, which no job
describes, and by how far its own jobs scatter.  A third of a model's jobs give the shift, a
weighted median; the others give the bounds, by split conformal prediction.  Before and after are
judged by cross-validation: on jobs whose architecture the calibration judged has not seen.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import DatasetError
from gpumemnet.gpu import CONTEXT_GROWTH_BYTES, DeviceProfile, device_profile
from gpumemnet.job.measurement import TRACED, architecture_keys, job_texts
from gpumemnet.physics.element_types import ELEMENT_BYTES
from gpumemnet.physics.replicas import WITH_OTHERS
from gpumemnet.predict.bundle import Bundle
from gpumemnet.predict.bundle_card import SiteCalibration, spread_unit, unit_levels
from gpumemnet.predict.conformal import Centre, bounds_kept, conformal_quantiles, weighted_centre
from gpumemnet.predict.model import BundleModel
from gpumemnet.predict.predictor import Predictor
from gpumemnet.site.observations import SiteRows
from gpumemnet.units import MIB

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

MIN_JOBS: Final = 20
"""Different jobs that a model's own shift and bounds need; about fifty are better."""
MIN_READINGS: Final = 3
"""Probes that are enough to know the context without observations."""
MAX_FIT_JOBS: Final = 50
"""More jobs hardly move a median: the others say more about the bounds."""
FOLDS: Final = 10


@dataclass(frozen=True, slots=True)
class CoverageFigures:
    """The bound at one coverage: jobs that it was put to the test by, those within it, bytes above
    what they took over these."""

    judged: int
    covered: int
    over_allocation: float | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Accuracy of a model's answers for ``jobs`` jobs that did not run out of memory.

    Attributes:
        jobs: number of them.
        median_error_mib, median_error_percent: medians of the absolute error.
        under_predicted: share of jobs that took more than expected.
        coverages: coverage → how its bound did.
    """

    jobs: int
    median_error_mib: float
    median_error_percent: float
    under_predicted: float
    coverages: Mapping[float, CoverageFigures]


@dataclass(frozen=True, slots=True)
class ModelCalibration:
    """One model of one family, calibrated.

    Attributes:
        bundle: the bundle that it is of, as it was.
        family, encoder: of the model.
        site: the calibration.
        is_own: whether shift and bounds are from jobs that this model answers for; else it has the
            context alone.
        shift: the shift, in bytes, with its interval.
        jobs, fit_jobs, calibration_jobs: different jobs that it answers for; for the shift; for the
            bounds.
        before, after: cross-validated; ``None`` where it answers for no job of the site.
    """

    bundle: Bundle
    family: str
    encoder: str
    site: SiteCalibration
    is_own: bool
    shift: Centre
    jobs: int
    fit_jobs: int
    calibration_jobs: int
    before: Figures | None
    after: Figures | None


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a site's rows tell about one GPU.

    Attributes:
        gpu, label_source: of the rows.
        jobs: different jobs.
        left_out: reason → rows that were not used.
        context: the CUDA context in bytes, with its interval.
        is_context_read: whether probes read it; else it is what jobs took less the reserved part
            that the models expect.
        models: every model of the bundles.
        files: name → SHA-256.
        first, last: when the first and the last job ended, ISO 8601, where that is known.
    """

    gpu: str
    label_source: str
    jobs: int
    left_out: Mapping[str, int]
    context: Centre
    is_context_read: bool
    models: tuple[ModelCalibration, ...]
    files: Mapping[str, str]
    first: str | None
    last: str | None


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The ``B`` jobs that one model answers for, in an order that has nothing to do with what they
    took; amounts in bytes.

    Attributes:
        model: the model.
        expected, bounds: of the graph, shapes ``[B]`` and ``[B, L]``.
        unit: of spread, shape ``[B]``.
        label: what the job took, NaN where it ran out of memory.
        limit: what it could have had, NaN where that is not known.
        reading: the context where it was read, else NaN.
        fold: of the job's architecture.
    """

    model: BundleModel
    expected: Array
    bounds: Array
    unit: Array
    label: Array
    limit: Array
    reading: Array
    fold: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Fit:
    site: SiteCalibration
    shift: Centre
    fit_jobs: int
    calibration_jobs: int


def calibrate(
    found: SiteRows,
    bundles: Sequence[Bundle],
    *,
    gpu: str | None = None,
    label_source: str | None = None,
) -> Calibration:
    """Calibrate ``bundles`` for the GPU that the rows are of.

    Args:
        found: the site's rows.
        bundles: that answer together; every family and encoder of them gets the context, and those
            with jobs enough their bounds.
        gpu: the one GPU whose rows count; needed where there are several.
        label_source: the one source whose rows count; needed where there are several.

    Raises:
        DatasetError: when the rows cannot carry a calibration; says why and what to do.
        InvalidRequestError: when there is no profile of the GPU.
        BundleError: when a bundle does not run.
    """
    rows, left_out = _one_kind(found, gpu, label_source)
    device = device_profile(rows.gpu[0])
    predictor = Predictor(bundles)
    weights = rows.jobs.column("total_parameters") * np.array(
        [ELEMENT_BYTES[name].weight for name in rows.jobs.options("precision")]
    ).take(rows.jobs.option_codes)
    possible = rows.take(np.flatnonzero(~(rows.label_bytes < weights)))
    kept = _different(possible)
    _count(
        left_out,
        "took less than their weights: the unit is wrong",
        len(rows) - len(possible),
    )
    _count(
        left_out,
        "another run of the same job, which took no more",
        len(possible) - len(kept),
    )
    parts, outside = _parts(predictor, kept, device.name)
    readings = kept.context_bytes[~np.isnan(kept.context_bytes)]
    is_read = len(readings) >= MIN_READINGS
    inside = max((sum(len(part.label) for part in of.values()) for of in parts.values()), default=0)
    _count(left_out, "outside the support of every model", len(kept) - inside)
    if not is_read:
        _check_enough(inside, len(kept), outside)
    context = (
        weighted_centre(readings, np.ones(len(readings)))
        if is_read
        else _residual_context(parts, None)
    )
    if context is None:
        raise DatasetError(
            f"all {len(kept)} jobs ran out of memory: what they took is not known, so nothing can be calibrated"
        )
    times = kept.observed_at[~np.isnan(kept.observed_at)].tolist()
    return Calibration(
        gpu=device.name,
        label_source=rows.label_source[0],
        jobs=len(kept),
        left_out=left_out,
        context=context,
        is_context_read=is_read,
        models=tuple(_calibrated(predictor, parts, device, context, is_read)),
        files=found.files,
        first=_iso(min(times)) if times else None,
        last=_iso(max(times)) if times else None,
    )


# rows


def _one_kind(
    found: SiteRows, gpu: str | None, label_source: str | None
) -> tuple[SiteRows, dict[str, int]]:
    """The rows of one GPU and one source with a known peak; and the number of other rows by
    reason."""
    left_out, names = dict(found.left_out), ", ".join(found.files)
    is_run = found.gpu.astype(bool) & (found.is_oom | ~np.isnan(found.label_bytes))
    is_alone = found.jobs.column("ranks") <= 1
    _count(left_out, "without what the job took, and on which GPU", int((~is_run).sum()))
    _count(left_out, WITH_OTHERS, int((is_run & ~is_alone).sum()))
    rows = found.take(np.flatnonzero(is_run & is_alone))
    if not len(rows):
        why = (
            "; ".join(f"{count} rows: {reason}" for reason, count in left_out.items())
            or "it is empty"
        )
        raise DatasetError(
            f"{names} says of no job what it took ({why}): give measurements or observations"
        )
    traced = int((rows.provenance == TRACED).sum())
    if traced:
        raise DatasetError(
            f"{names} holds {traced} rows with traced labels, which are predictions themselves: calibrate on what a GPU has run"
        )
    for field, chosen, option in (
        ("gpu", gpu and device_profile(gpu).name, "--gpu"),
        ("label_source", label_source, "--label-source"),
    ):
        values = getattr(rows, field)
        counts = Counter(values)
        if chosen is None and len(counts) > 1:
            listed = ", ".join(f"{value} ({count})" for value, count in counts.most_common())
            what = (
                "several GPUs"
                if field == "gpu"
                else "labels that were read in different ways, which differ by themselves"
            )
            raise DatasetError(f"{names} holds rows of {what}: {listed}; choose one with {option}")
        if chosen is not None:
            if chosen not in counts:
                raise DatasetError(
                    f"{names} holds no rows of {chosen}: there are {', '.join(counts)}"
                )
            rows = rows.take(np.flatnonzero(values == chosen))
            _count(
                left_out,
                f"of another {'GPU' if field == 'gpu' else 'label source'}",
                sum(counts.values()) - len(rows),
            )
    return rows, left_out


def _different(rows: SiteRows) -> SiteRows:
    """One row for each job: the run with the largest reading, or the one that ran out of memory.

    They come in an order that has nothing to do with what they took, nor with the order of the
    files.
    """
    # Calibrated is what answers without a trace.
    rows = replace(rows, jobs=rows.jobs.with_numbers("traced_peak_bytes", np.zeros(len(rows))))
    job_hashes = np.array([*map(_hash, job_texts(rows.jobs))])
    order = np.lexsort((np.nan_to_num(rows.label_bytes), rows.is_oom, job_hashes))
    is_last = np.append(job_hashes[order][1:] != job_hashes[order][:-1], True)
    return rows.take(order[is_last])


def _parts(
    predictor: Predictor, rows: SiteRows, gpu: str
) -> tuple[dict[str, dict[tuple[str, str], _Part]], Counter[str]]:
    """Encoder → family and name of a model → the jobs that it answers for, as the predictor asks;
    why others have none."""
    keys = [*architecture_keys(rows.jobs)]
    fold_of = {key: number % FOLDS for number, key in enumerate(sorted(set(keys), key=_hash))}
    folds = np.array([fold_of[key] for key in keys])
    families = rows.jobs.option_column("family")
    parts: dict[str, dict[tuple[str, str], _Part]] = {}
    outside: Counter[str] = Counter()
    for family, encoder in _slots(predictor):
        is_readable = (rows.jobs.layer_counts > 0) | (encoder != "transformer")
        left = np.flatnonzero((families == family) & is_readable)
        for model in predictor.models_of(family, encoder):
            if not len(left):
                break
            own = rows.take(left)
            features = model.features(own.jobs, predictor.model_gpu(model, gpu))
            unseen = model.support.check(own.jobs, features)
            inside, others = np.flatnonzero(unseen.counts == 0), np.flatnonzero(unseen.counts)
            outside.update(
                reason for number in others.tolist() for reason in unseen.reasons(number)
            )
            if len(inside):
                mine = own.take(inside)
                predicted = model.run(mine.jobs, features[inside])
                parts.setdefault(encoder, {})[family, model.card.name] = _Part(
                    model=model,
                    expected=predicted.expected_bytes,
                    bounds=predicted.bounds_bytes,
                    unit=spread_unit(predicted.bounds_bytes, unit_levels(model.card.coverages)),
                    label=mine.label_bytes,
                    limit=mine.limit_bytes,
                    reading=mine.context_bytes,
                    fold=folds[left[inside]],
                )
            left = left[others]
    return parts, outside


def _slots(predictor: Predictor) -> list[tuple[str, str]]:
    """Families and encoders for which there are models, in the order of the bundles."""
    return list(
        dict.fromkeys(
            (family, bundle.card.encoder)
            for bundle in predictor.bundles
            for family in bundle.card.families
        )
    )


def _check_enough(inside: int, rows: int, outside: Counter[str]) -> None:
    remedy = f"{MIN_JOBS} are needed, about 50 are better; or {MIN_READINGS} rows of dataset_builder, which read the context"
    if not inside:
        commonest = (
            f": {outside.most_common(1)[0][0]}"
            if outside
            else ", as no model is loaded for their family"
        )
        raise DatasetError(
            f"all {rows} jobs lie outside the support of the models, which say nothing of them{commonest[:400]}"
        )
    if inside < MIN_JOBS:
        raise DatasetError(
            f"{inside} different jobs within the models' support are too few to calibrate on: {remedy}"
        )


# fitting


def _calibrated(
    predictor: Predictor,
    parts: Mapping[str, Mapping[tuple[str, str], _Part]],
    device: DeviceProfile,
    context: Centre,
    is_read: bool,
) -> list[ModelCalibration]:
    calibrated = []
    folds = range(FOLDS)
    contexts = {fold: _context_without(parts, fold, is_read) for fold in folds}
    for family, encoder in _slots(predictor):
        for model in predictor.models_of(family, encoder):
            part = parts.get(encoder, {}).get((family, model.card.name))
            is_own = part is not None and len(part.label) >= MIN_JOBS
            fit = _fit(model, device.name, part, None, context, is_own)
            before = after = None
            if part is not None:
                fits = {
                    fold: _fit(
                        model,
                        device.name,
                        part,
                        part.fold != fold,
                        contexts[fold] or context,
                        is_own,
                    )
                    for fold in folds
                    if (part.fold == fold).any()
                    and (part.fold != fold).any()
                    and contexts[fold] is not None
                }
                before, after = _judged(part, predictor.model_gpu(model, device.name), fits)
            calibrated.append(
                ModelCalibration(
                    bundle=model.bundle,
                    family=family,
                    encoder=encoder,
                    site=fit.site,
                    is_own=fit.fit_jobs > 0,
                    shift=fit.shift,
                    jobs=0 if part is None else len(part.label),
                    fit_jobs=fit.fit_jobs,
                    calibration_jobs=fit.calibration_jobs,
                    before=before,
                    after=after,
                )
            )
    return calibrated


def _context_without(
    parts: Mapping[str, Mapping[tuple[str, str], _Part]], fold: int, is_read: bool
) -> Centre | None:
    """The context by the jobs of the other folds; ``None`` if there are none."""
    if is_read:
        known = [part.reading[part.fold != fold] for of in parts.values() for part in of.values()]
        readings = np.concatenate(known) if known else np.empty(0)
        readings = readings[~np.isnan(readings)]
        return weighted_centre(readings, np.ones(len(readings))) if len(readings) else None
    return _residual_context(parts, fold)


def _residual_context(
    parts: Mapping[str, Mapping[tuple[str, str], _Part]], without: int | None
) -> Centre | None:
    """The context as what jobs took less the part that the models expect to be reserved, by the
    encoder that answers for most."""
    of = max(parts.values(), key=lambda models: sum(len(part.label) for part in models.values()))
    values, weights = [], []
    for part in of.values():
        known = ~np.isnan(part.label) & (part.fold != (-1 if without is None else without))
        values.append((part.label - part.expected + part.model.card.context_bytes)[known])
        weights.append(1.0 / part.unit[known])
    amounts = np.concatenate(values)
    return weighted_centre(amounts, np.concatenate(weights)) if len(amounts) else None


def _fit(
    model: BundleModel,
    gpu: str,
    part: _Part | None,
    keep: Flags | None,
    context: Centre,
    is_own: bool,
) -> _Fit:
    """The calibration of ``model`` by the jobs of ``part`` that ``keep`` names, all unless given;
    by the context alone else."""
    coverages, levels = model.card.coverages, unit_levels(model.card.coverages)
    if is_own and part is not None:
        rows = np.flatnonzero(np.ones(len(part.label), dtype=bool) if keep is None else keep)
        count = min(max(len(rows) // 3, 1), MAX_FIT_JOBS)
        first, others = rows[:count], rows[count:]
        first = first[~np.isnan(part.label[first])]
        if len(first):
            shift = weighted_centre((part.label - part.expected)[first], 1.0 / part.unit[first])
            shift_bytes = round(shift.value)
            expected = part.expected + shift_bytes
            # Whether a job is expected to fit does not depend on what it took, so that leaving the
            # others out biases nothing.
            others = others[~(expected > part.limit)[others]]
            scores = ((part.label - expected) / part.unit)[others]
            finite = scores[~np.isnan(scores)]
            site = SiteCalibration(
                gpu=gpu,
                shift_bytes=shift_bytes,
                shift_bound_bytes=shift_bytes,
                multiples=conformal_quantiles(
                    np.where(np.isnan(scores), np.inf, scores), coverages
                ),
                largest=float(finite.max()) if len(finite) else None,
                unit_levels=levels,
            )
            return _Fit(site, shift, len(first), len(others))
    own = model.card.context_bytes
    shift = replace(
        context, value=context.value - own, low=context.low - own, high=context.high - own
    )
    site = SiteCalibration(
        gpu=gpu,
        shift_bytes=round(shift.value),
        shift_bound_bytes=math.ceil(max(shift.value, shift.high)) + CONTEXT_GROWTH_BYTES,
        multiples=(None,) * len(coverages),
        largest=None,
        unit_levels=levels,
    )
    return _Fit(site, shift, 0, 0)


def _judged(
    part: _Part, model_gpu: Any, fits: Mapping[int, _Fit]
) -> tuple[Figures | None, Figures | None]:
    """Figures of the model as it answers now, and as each fold's jobs are answered by the
    calibration of the others."""
    rows = np.flatnonzero(np.isin(part.fold, list(fits)))
    if not len(rows) or np.isnan(part.label[rows]).all():
        return None, None
    expected, bounds = np.full(len(part.label), np.nan), np.full(part.bounds.shape, np.nan)
    for fold, fit in fits.items():
        mine = part.fold == fold
        expected[mine] = part.expected[mine] + fit.site.shift_bytes
        bounds[mine] = (
            fit.site.bounds(part.expected[mine], part.bounds[mine]) + fit.site.shift_bound_bytes
        )
    before = (
        part.bounds if model_gpu.site is None else model_gpu.site.bounds(part.expected, part.bounds)
    )
    coverages = part.model.card.coverages
    label, limit = part.label[rows], part.limit[rows]
    return (
        _figures(
            label,
            limit,
            (part.expected + model_gpu.shift_bytes)[rows],
            (before + model_gpu.shift_bound_bytes)[rows],
            coverages,
        ),
        _figures(label, limit, expected[rows], bounds[rows], coverages),
    )


def _figures(
    label: Array, limit: Array, expected: Array, bounds: Array, coverages: Sequence[float]
) -> Figures:
    expected = np.maximum(expected, 1.0)
    is_known = ~np.isnan(label)
    errors = np.abs(expected - label)[is_known]
    figures = {}
    for level, coverage in enumerate(coverages):
        safe = np.maximum(bounds[:, level], expected)
        # A job that ran out of less than its bound does not put the bound to the test.
        kept = bounds_kept(label, ~is_known, limit, safe)
        total = label[is_known].sum()
        figures[coverage] = CoverageFigures(
            int((~np.isnan(kept)).sum()),
            int(np.nansum(kept)),
            float((safe[is_known].sum() - total) / total),
        )
    return Figures(
        jobs=len(errors),
        median_error_mib=float(np.median(errors) / MIB),
        median_error_percent=float(100.0 * np.median(errors / label[is_known])),
        under_predicted=float((expected < label)[is_known].mean()),
        coverages=figures,
    )


def _count(left_out: dict[str, int], reason: str, number: int) -> None:
    if number:
        left_out[reason] = left_out.get(reason, 0) + number


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
