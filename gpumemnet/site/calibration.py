"""Calibrates models to a site without retraining: the CUDA context and the bounds, from a few
probes or some fifty observations.

A site differs from the machine that a model learned on mostly by the CUDA context, which no job
describes, and by how far its own jobs scatter.  A third of a model's jobs give the shift, a
weighted median; the others give the bounds, by split conformal prediction.  Before and after are
judged by cross-validation: on jobs whose architecture the calibration judged has not seen.

Rows that cannot be true are left out, with the reason.  A calibration is refused where too many
are, or where it would move or widen the answers more than a difference between sites explains.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final

import numpy as np

from gpumemnet.errors import DatasetError
from gpumemnet.gpu import CONTEXT_GROWTH_BYTES, DeviceProfile, device_profile
from gpumemnet.job.job_table import Array, Flags, Indices
from gpumemnet.job.layers import listed
from gpumemnet.job.measurement import TRACED, architecture_keys, job_texts
from gpumemnet.physics.replicas import WITH_OTHERS
from gpumemnet.predict.bundle import Bundle
from gpumemnet.predict.bundle_card import SiteCalibration, spread_unit, unit_levels
from gpumemnet.predict.conformal import Centre, bounds_kept, conformal_quantiles, weighted_centre
from gpumemnet.predict.predictor import BundleModel, Predictor
from gpumemnet.site.implausible_rows import training_state_bytes
from gpumemnet.site.observations import SiteRows
from gpumemnet.units import GIB, MIB, format_bytes

MIN_JOBS: Final = 20
"""Different jobs that a model's own shift and bounds need; about fifty are better."""
MAX_FIT_JOBS: Final = 50
"""More jobs hardly move a median: the others say more about the bounds."""
FOLDS: Final = 10
MOST_IMPOSSIBLE: Final = 0.1
"""Share of rows that cannot be true above which the others are not trusted either."""
MOST_NAMED: Final = 100
"""Rows that an error names one by one."""
MAX_WIDENING: Final = 1.5
"""Most by which a bound over the expectation may grow, in the median.  A choice: jobs that scatter
more call for another model, and a few wrong rows widen the bounds of all jobs."""
MIN_CONTEXT_BYTES: Final = 64 * MIB
"""Below the smallest CUDA context that is known."""
MAX_CONTEXT_BYTES: Final = 4 * GIB
"""Twice the largest CUDA context that is known."""


@dataclass(frozen=True)
class CoverageFigures:
    """The bound at one coverage: jobs that it was put to the test by, those within it, bytes above
    what they took over these."""

    coverage: float
    judged: int
    covered: int
    over_allocation: float


@dataclass(frozen=True)
class Figures:
    """Accuracy of a model's answers for ``jobs`` jobs that did not run out of memory.

    Attributes:
        jobs: number of them.
        median_error_mib, median_error_percent: medians of the absolute error.
        under_predicted: share of jobs that took more than expected.
        coverages: how the bound at each coverage did.
    """

    jobs: int
    median_error_mib: float
    median_error_percent: float
    under_predicted: float
    coverages: tuple[CoverageFigures, ...]


@dataclass(frozen=True, kw_only=True)
class ModelCalibration:
    """One model, calibrated.

    Attributes:
        bundle: the bundle that it is of, as it was.
        site: its calibration.
        shift: the shift, in bytes, with its interval.
        jobs: different jobs that it answers for.
        fit_jobs, calibration_jobs: those for the shift, and those for the bounds; 0 where it has too
            few of its own, and so the context alone.
        before, after: cross-validated; ``None`` where it answers for no job of the site.
    """

    bundle: Bundle
    site: SiteCalibration
    shift: Centre
    jobs: int = 0
    fit_jobs: int = 0
    calibration_jobs: int = 0
    before: Figures | None = None
    after: Figures | None = None

    @property
    def is_own(self) -> bool:
        """Whether shift and bounds are from jobs that this model answers for."""
        return self.fit_jobs > 0


@dataclass(frozen=True)
class Calibration:
    """What a site's rows tell about one GPU.

    Attributes:
        gpu, label_source: of the rows.
        jobs: different jobs.
        left_out: reason → the locations of the rows that were not used.
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
    left_out: Mapping[str, Sequence[str]]
    context: Centre
    is_context_read: bool
    models: tuple[ModelCalibration, ...]
    files: Mapping[str, str]
    first: str | None
    last: str | None


@dataclass(frozen=True, eq=False)
class _Part:
    """The ``B`` jobs that one model answers for, in an order that has nothing to do with what they
    took; amounts in bytes.

    Attributes:
        model: the model.
        rows: the jobs.
        fold: of each job's architecture.
        expected, bounds: of the graph, shapes ``[B]`` and ``[B, L]``.
        answered, answered_bounds: the same, as the model answers until now.
    """

    model: BundleModel
    rows: SiteRows
    fold: Indices
    expected: Array
    bounds: Array
    answered: Array
    answered_bounds: Array

    @property
    def unit(self) -> Array:
        """Each job's unit of spread, shape ``[B]``."""
        return spread_unit(self.bounds, unit_levels(self.model.card.coverages))


_Parts = Mapping[str, _Part]
"""Encoder of a model → the jobs that it answers for."""


def calibrate(
    found: SiteRows,
    bundles: Sequence[Bundle],
    *,
    gpu: str | None = None,
) -> Calibration:
    """Calibrate ``bundles`` for the GPU that the rows are of.

    Args:
        found: the site's rows.
        bundles: that answer together; all of them get the context, and those with jobs enough their
            bounds.
        gpu: the one GPU whose rows count; that of most rows by default.

    Raises:
        DatasetError: when the rows cannot carry a calibration; says why and what to do.
        InvalidRequestError: when there is no profile of the GPU.
        BundleError: when a bundle does not run.
    """
    left_out = {reason: [*locations] for reason, locations in found.left_out.items()}
    rows = _one_kind(found, left_out, gpu)
    device = device_profile(rows.gpu[0])
    predictor = Predictor(bundles)
    kept = _different(_possible(rows, left_out, device), left_out)
    parts, outside = _parts(predictor, kept, device.name)
    readings = kept.context_bytes[~np.isnan(kept.context_bytes)]
    is_read = bool(len(readings))  # it is the same in every process of one driver and one PyTorch
    is_inside = np.isin(
        kept.location, [one for part in parts.values() for one in part.rows.location]
    )
    _leave_out(left_out, "outside the support of every model", kept, ~is_inside)
    if not is_read:
        _check_enough(int(is_inside.sum()), len(kept), outside)
    context = (
        weighted_centre(readings, np.ones(len(readings))) if is_read else _residual_context(parts)
    )
    _check_context(context.value, "the jobs")
    times = kept.observed_at[~np.isnan(kept.observed_at)].tolist()
    return Calibration(
        gpu=device.name,
        label_source=rows.label_source[0],
        jobs=len(kept),
        left_out=left_out,
        context=context,
        is_context_read=is_read,
        models=tuple(
            _calibrated(predictor.model(encoder), parts.get(encoder), device, context)
            for encoder in (bundle.card.encoder for bundle in predictor.bundles)
        ),
        files=found.files,
        first=_iso(min(times)) if times else None,
        last=_iso(max(times)) if times else None,
    )


# rows


def _leave_out(left_out: dict[str, list[str]], reason: str, rows: SiteRows, which: Flags) -> None:
    if which.any():
        left_out.setdefault(reason, []).extend(rows.location[which])


def _one_kind(found: SiteRows, left_out: dict[str, list[str]], gpu: str | None) -> SiteRows:
    """The rows with a known peak of one GPU and one source: labels of several differ by
    themselves."""
    names = ", ".join(found.files)
    is_run = found.gpu.astype(bool) & (found.is_oom | ~np.isnan(found.label_bytes))
    is_alone = found.jobs.column("ranks") <= 1
    _leave_out(left_out, "without what the job took, and on which GPU", found, ~is_run)
    _leave_out(left_out, WITH_OTHERS, found, is_run & ~is_alone)
    rows = found.take(is_run & is_alone)
    if not len(rows):
        why = "; ".join(f"{len(some)} rows: {reason}" for reason, some in left_out.items())
        raise DatasetError(
            f"{names} says of no job what it took ({why or 'it is empty'}): give measurements or observations"
        )
    if (rows.provenance == TRACED).any():
        raise DatasetError(
            f"{names} holds traced labels, which are predictions themselves: calibrate on what a GPU has run"
        )
    for field, name in (("gpu", gpu and device_profile(gpu).name), ("label_source", None)):
        values = getattr(rows, field)
        counts = Counter(values)
        chosen = name or counts.most_common(1)[0][0]
        if chosen not in counts:
            raise DatasetError(f"{names} holds no rows of {chosen}: there are {', '.join(counts)}")
        _leave_out(left_out, f"of another {field.replace('_', ' ')}", rows, values != chosen)
        rows = rows.take(values == chosen)
    return rows


def _possible(rows: SiteRows, left_out: dict[str, list[str]], device: DeviceProfile) -> SiteRows:
    """The rows that can be true.

    Raises:
        DatasetError: when so many cannot that the others are not trusted either.
    """
    least = training_state_bytes(rows.jobs)[1] + MIN_CONTEXT_BYTES
    impossible = {
        "took less than weights, gradients, optimizer state and a CUDA context": rows.label_bytes
        < least,
        f"took more than {device.name} has": rows.label_bytes > device.capacity_bytes,
    }
    for reason, which in impossible.items():
        _leave_out(left_out, reason, rows, which)
    is_wrong = np.any([*impossible.values()], axis=0)
    if is_wrong.sum() > MOST_IMPOSSIBLE * len(rows):
        why = "; ".join(
            f"{listed(left_out[reason], MOST_NAMED)}: {reason}"
            for reason, which in impossible.items()
            if which.any()
        )
        raise DatasetError(
            f"{is_wrong.sum()} of {len(rows)} rows cannot be true, so the others are not trusted either ({why}): "
            "is the unit right? Correct or remove them"
        )
    return rows.take(~is_wrong)


def _different(rows: SiteRows, left_out: dict[str, list[str]]) -> SiteRows:
    """One row for each job: the run with the largest reading, or the one that ran out of memory.

    They come in an order that has nothing to do with what they took, nor with the order of the
    files.
    """
    # Calibrated is what answers without a trace.
    rows = replace(rows, jobs=rows.jobs.with_numbers("traced_peak_bytes", np.zeros(len(rows))))
    job_hashes = np.array([*map(_hash, job_texts(rows.jobs))])
    order = np.lexsort((np.nan_to_num(rows.label_bytes), rows.is_oom, job_hashes))
    is_last = np.append(job_hashes[order][1:] != job_hashes[order][:-1], True)
    rows = rows.take(order)
    _leave_out(left_out, "another run of the same job, which took no more", rows, ~is_last)
    return rows.take(is_last)


def _parts(predictor: Predictor, rows: SiteRows, gpu: str) -> tuple[_Parts, Counter[str]]:
    """The jobs that each model answers for, as the predictor asks them; why others have none."""
    keys = [*architecture_keys(rows.jobs)]
    fold_of = {key: number % FOLDS for number, key in enumerate(sorted(set(keys), key=_hash))}
    folds = np.array([fold_of[key] for key in keys])
    families = rows.jobs.option_column("family")
    parts: dict[str, _Part] = {}
    outside: Counter[str] = Counter()
    for card in (bundle.card for bundle in predictor.bundles):
        model = predictor.model(card.encoder)
        is_asked = np.isin(families, card.families)
        if model.needs_layers:
            is_asked &= rows.jobs.layer_counts > 0
        if not is_asked.any():
            continue
        own = rows.take(is_asked)
        model_gpu = model.model_gpu(predictor.prediction_gpu(gpu))
        features = model.features(own.jobs, model_gpu)
        unseen = model.support.check(own.jobs, features)
        inside, others = np.flatnonzero(unseen.counts == 0), np.flatnonzero(unseen.counts)
        outside.update(reason for number in others.tolist() for reason in unseen.reasons(number))
        if len(inside):
            mine = own.take(inside)
            predicted = model.run(mine.jobs, features[inside])
            expected, bounds = predicted.expected_bytes, predicted.bounds_bytes
            answered = bounds if model_gpu.site is None else model_gpu.site.bounds(expected, bounds)
            parts[card.encoder] = _Part(
                model=model,
                rows=mine,
                fold=folds[is_asked][inside],
                expected=expected,
                bounds=bounds,
                answered=expected + model_gpu.shift_bytes,
                answered_bounds=answered + model_gpu.shift_bound_bytes,
            )
    return parts, outside


def _check_enough(inside: int, rows: int, outside: Counter[str]) -> None:
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
            f"{inside} different jobs within the models' support are too few to calibrate on: {MIN_JOBS} are needed, "
            f"about 50 are better; or one row of dataset_builder, which reads the context"
        )


# fitting


def _calibrated(
    model: BundleModel, part: _Part | None, device: DeviceProfile, context: Centre
) -> ModelCalibration:
    """The calibration of one model, judged by jobs of architectures that it has not seen; only the
    context, one number, is that of all jobs."""
    by_context = _by_context(model, device.name, context)
    if part is None:
        return by_context
    is_own = len(part.rows) >= MIN_JOBS
    made = (is_own and _fit(part, device.name, np.ones(len(part.rows), bool))) or by_context
    expected, bounds = np.empty_like(part.expected), np.empty_like(part.bounds)
    for fold in set(part.fold.tolist()):
        mine = part.fold == fold
        site = ((is_own and _fit(part, device.name, ~mine)) or made).site
        expected[mine] = part.expected[mine] + site.shift_bytes
        bounds[mine] = site.bounds(part.expected[mine], part.bounds[mine]) + site.shift_bound_bytes
    if made.is_own:
        _check_plausible(part, made)
    return replace(
        made,
        jobs=len(part.rows),
        before=_figures(part, part.answered, part.answered_bounds),
        after=_figures(part, expected, bounds),
    )


def _residual_context(parts: _Parts) -> Centre:
    """The context as what jobs took less the part that the models expect to be reserved, by the
    model that answers for most."""
    part = max(parts.values(), key=lambda part: len(part.rows))
    amounts, weights = part.rows.label_bytes - part.expected, 1.0 / part.unit
    is_known = ~np.isnan(amounts)
    if not is_known.any():
        raise DatasetError(
            f"all {len(amounts)} jobs ran out of memory: what they took is not known, so nothing can be calibrated"
        )
    return weighted_centre(amounts[is_known], weights[is_known])


def _fit(part: _Part, gpu: str, is_used: Flags) -> ModelCalibration | None:
    """The calibration by the used jobs; ``None`` where those for the shift ran out of memory."""
    coverages, unit, label = part.model.card.coverages, part.unit, part.rows.label_bytes
    rows = np.flatnonzero(is_used)
    count = min(max(len(rows) // 3, 1), MAX_FIT_JOBS)
    first, others = rows[:count], rows[count:]
    first = first[~np.isnan(label[first])]
    if not len(first):
        return None
    shift = weighted_centre((label - part.expected)[first], 1.0 / unit[first])
    shift_bytes = round(shift.value)
    expected = part.expected + shift_bytes
    # Whether a job is expected to fit does not depend on what it took, so that leaving the
    # others out biases nothing.
    others = others[~(expected > part.rows.limit_bytes)[others]]
    scores = ((label - expected) / unit)[others]
    finite = scores[~np.isnan(scores)]
    site = SiteCalibration(
        gpu=gpu,
        shift_bytes=shift_bytes,
        shift_bound_bytes=shift_bytes,
        multiples=conformal_quantiles(np.where(np.isnan(scores), np.inf, scores), coverages),
        largest=float(finite.max()) if len(finite) else None,
        unit_levels=unit_levels(coverages),
    )
    return ModelCalibration(
        bundle=part.model.bundle,
        site=site,
        shift=shift,
        fit_jobs=len(first),
        calibration_jobs=len(others),
    )


def _by_context(model: BundleModel, gpu: str, shift: Centre) -> ModelCalibration:
    """The calibration by the context alone."""
    coverages = model.card.coverages
    site = SiteCalibration(
        gpu=gpu,
        shift_bytes=round(shift.value),
        shift_bound_bytes=math.ceil(max(shift.value, shift.high)) + CONTEXT_GROWTH_BYTES,
        multiples=(None,) * len(coverages),
        largest=None,
        unit_levels=unit_levels(coverages),
    )
    return ModelCalibration(bundle=model.bundle, site=site, shift=shift)


def _check_plausible(part: _Part, made: ModelCalibration) -> None:
    """Refuses a calibration that a difference between sites does not explain.

    Raises:
        DatasetError: names the bound and the rows that took most beyond theirs.
    """
    card = part.model.card
    _check_context(made.shift.value, card.name)
    expected = (part.expected + made.site.shift_bytes)[:, None]
    bounds = made.site.bounds(part.expected, part.bounds) + made.site.shift_bound_bytes
    widening = np.median(
        (bounds / expected) / (part.answered_bounds / part.answered[:, None]), axis=0
    )
    for level in np.flatnonzero(widening > MAX_WIDENING).tolist():
        before = part.bounds[:, level] + made.site.shift_bytes
        excess = np.nan_to_num(part.rows.label_bytes / before)
        worst = np.argsort(-excess, kind="stable")[: max(1, int((excess > 1.0).sum()))]
        named = listed(part.rows.location[worst].tolist(), MOST_NAMED)
        raise DatasetError(
            f"{card.name}: the bound at coverage {card.coverages[level]:g} would become {widening[level]:.3g} times as wide, "
            f"and no more than {MAX_WIDENING:g} is plausible: {named} took up to {excess.max():.3g} "
            "times their old bound; correct or remove these rows, or retrain if they are right"
        )


def _check_context(context_bytes: float, name: str) -> None:
    if not MIN_CONTEXT_BYTES <= context_bytes <= MAX_CONTEXT_BYTES:
        raise DatasetError(
            f"by {name} a CUDA context would take {format_bytes(context_bytes)}, which none does: are unit and GPU right?"
        )


def _figures(part: _Part, expected: Array, bounds: Array) -> Figures | None:
    label, expected = part.rows.label_bytes, np.maximum(expected, 1.0)
    is_known = ~np.isnan(label)
    if not is_known.any():
        return None
    errors = np.abs(expected - label)[is_known]
    total = label[is_known].sum()
    figures = []
    for level, coverage in enumerate(part.model.card.coverages):
        safe = np.maximum(bounds[:, level], expected)
        # A job that ran out of less than its bound does not put the bound to the test.
        kept = bounds_kept(label, ~is_known, part.rows.limit_bytes, safe)
        judged, covered = int((~np.isnan(kept)).sum()), int(np.nansum(kept))
        over_allocation = float(safe[is_known].sum() / total - 1.0)
        figures.append(CoverageFigures(coverage, judged, covered, over_allocation))
    return Figures(
        jobs=len(errors),
        median_error_mib=float(np.median(errors) / MIB),
        median_error_percent=float(100.0 * np.median(errors / label[is_known])),
        under_predicted=float((expected < label)[is_known].mean()),
        coverages=tuple(figures),
    )


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
