"""The card of a trained classifier: what it answers for, what it learned from, and how its bounds
were calibrated.

Calibrates traced peaks against measured memory, so that a bundle can answer jobs with a traced
peak.

The expected bytes are the traced reserved bytes plus the CUDA context of the labels, shifted by the
median error.  The bound is the conformal quantile of the ratio of label and expectation over rows
that are not used to fit anything else (split conformal prediction).  It holds for jobs like those
rows, so the card lists their options.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import torch

from gpumemnet.gpu import blas_workspace_bytes
from gpumemnet.job.measurement import PUBLISHED_GPU, TRACED
from gpumemnet.job.training_job import OPTION_FIELDS, UNSTATED_AS_ZERO
from gpumemnet.predict.bundle_card import ALL_FAMILIES, COMMON, FORMAT_VERSION
from gpumemnet.predict.features import FEATURE_NAMES, FEATURE_SCHEMA
from gpumemnet.site.drift import training_reference

from ..networks.inference import SequenceClassifier
from .bounds import conformal_bounds, has_enough_rows
from .data import LabelledJobs
from .mlp import TrainedClassifier, TrainingPlan
from .sequence import SequencePlan

LIMITS: Final = (
    "Holds for the options, layer kinds and ranges under 'support'; beyond them the answer is the closed form, with safe bytes "
    "only where its calibration on real networks, under 'fallback', holds."
)
SUPPORT_OPTION_FIELDS: Final = (
    *("optimizer", "optimizer_implementation", "precision", "checkpointing", "attention_kernel"),
    *("channels_last", "cudnn_benchmark", "gradient_accumulation", "sequence_length"),
)
"""Job fields whose values in the training data bound the model's support."""
COUNT_FIELDS: Final = ("sequence_length",)
"""Numeric options: the support lists a range if they have many values."""
MOST_OPTIONS: Final = 8
TRACED_OPTION_FIELDS: Final = ("precision", "checkpointing", "channels_last", "cudnn_benchmark")
"""Job fields that decide which kernels run; a trace can misjudge the scratch memory and
fragmentation of these."""
RANGE_COLUMNS: Final = (
    *("batch_size", "input_elements", "total_parameters", "total_activations", "trainable_share"),
    *("input_bytes", "activation_bytes"),
)
"""Feature columns whose range in the training data bounds the model's support; totals are enough to
compute them."""
UNSEEN_OPTION_LOG_SCALE: Final = math.log(2.0) / math.log(0.995 / 0.005)
"""Scale of a logistic whose central 99 % reach from half to double, for options on which the closed
form is untested."""
PUBLISHED_FILES: Final = {
    "mlp": "mlp_data_step2.csv",
    "cnn": "cnn_data_step1.csv",
    "transformer": "transformer_data.csv",
}
"""Family → file of its published readings, below ``Datasets/``."""
TRACED_CREDIT: Final[Mapping[str, str]] = {
    "description": "training jobs drawn from this project's recipes, labelled by its trace: no GPU has run them",
    "source": "python -m research trace-recipe",
    "licence": "Apache-2.0",
}


def classifier_card(
    classifier: TrainedClassifier,
    data: LabelledJobs,
    plan: TrainingPlan | SequencePlan,
    *,
    name: str,
    version: str,
    metrics: Sequence[Mapping[str, Any]],
    traces: Mapping[str, LabelledJobs],
) -> dict[str, Any]:
    """Return the content of ``card.json``.

    Args:
        classifier: the trained model.
        data: the training data.
        plan: the training plan.
        name, version: of the model.
        metrics: rows of the evaluation table.
        traces: family → measured jobs with traced peaks; ``data`` for a family without.
    """
    by_family: dict[str, Any] = {}
    for family, scale in classifier.range_log_scales.items() if data.family == ALL_FAMILIES else ():
        own = data.take(data.rows_of(family))
        counts = {"rows": len(own), "architectures": len(np.unique(own.groups))}
        by_family[family] = counts | _family_parts(
            own, scale, classifier.coverages, traces.get(family, own)
        )
    log_scale = max(classifier.range_log_scales.values())
    traces_of_all = None if by_family else traces.get(data.family, data)
    card: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "name": name,
        "version": version,
        "family": data.family,
        "encoder": _encoder(classifier, data.family),
        "gpu": data.gpu,
        "feature_schema": FEATURE_SCHEMA,
        "features": list(FEATURE_NAMES),
        "device": {
            "capacity_bytes": data.capacity_bytes,
            "blas_workspace_bytes": blas_workspace_bytes(data.gpu),
            "context_bytes": 0 if data.context_bytes is None else data.context_bytes,
        },
        "intended_use": f"Memory of {', '.join(data.families)} training jobs on one GPU, before they start, for schedulers and "
        "batch prediction.",
        "limits": LIMITS,
        "training_data": _training_data(data),
        "conformal": _conformal(classifier, is_common=bool(by_family)),
        **_family_parts(data, log_scale, classifier.coverages, traces_of_all),
        "training": {
            **asdict(plan),
            "best_epochs": list(classifier.best_epochs),
            "torch": torch.__version__.split("+")[0],
        },
        "metrics": [dict(row) for row in metrics],
    }
    if by_family:
        card["families"] = by_family
        card["training_data"]["sha256_method"] = (
            "over the hashes of the families' dataset files, one a line"
        )
    return card


def _encoder(classifier: TrainedClassifier, family: str) -> str:
    if family == ALL_FAMILIES:
        return COMMON
    return "transformer" if isinstance(classifier.network, SequenceClassifier) else "mlp"


def _training_data(data: LabelledJobs) -> dict[str, Any]:
    return {
        **_credit(data),
        **_real_networks(data),
        "rows": len(data),
        "architectures": len(np.unique(data.groups)),
        "provenance": data.provenance,
        "label_source": data.label_source,
        "sha256": data.sha256,
    }


def _credit(data: LabelledJobs) -> Mapping[str, str]:
    """Return the source of the readings or traces that the labels are from."""
    if data.provenance == TRACED:
        return TRACED_CREDIT
    if data.provenance != "published" or data.gpu != PUBLISHED_GPU:
        return {"description": f"{data.provenance} readings on {data.gpu}"}
    families = {"mlp": "MLP", "cnn": "CNN"}
    named = ", ".join(families.get(family, family) for family in data.families)
    files = ", ".join(PUBLISHED_FILES[family] for family in data.families)
    out_of_memory = int(np.isnan(data.label_bytes).sum())
    without = f", {out_of_memory} of which ran out of memory" if out_of_memory else ""
    return {
        "description": f"{len(data):,} {named} training jobs (fp32, Adam{without}) measured by GPUMemNet on one A100-SXM4-40GB: "
        "maximum of one-second nvidia-smi readings of the whole GPU over 60 s",
        "source": f"https://github.com/itu-rad/GPUMemNet (Datasets: {files}); arXiv 2602.17817",
        "licence": "CC BY 4.0",
        "credit": "Measurements by the authors of GPUMemNet, IT University of Copenhagen (itu-rad)",
    }


def _real_networks(data: LabelledJobs) -> Mapping[str, Any]:
    """Return the entry on real networks among the training jobs; empty without any."""
    if data.is_real is None:
        return {}
    return {
        "real_networks": {
            "description": "readings of timm models on an A100 (GPUMemNet's repository, FakeTensor), above the CUDA context, and "
            "traced jobs of real architectures",
            "source": "https://github.com/itu-rad/GPUMemNet (Related_works/FakeTensor); python -m research trace-real-jobs",
            "licence": "CC BY 4.0; Apache-2.0",
            "rows": int(data.is_real.sum()),
            "architecture_families": list(data.real_families),
        }
    }


def _conformal(classifier: TrainedClassifier, *, is_common: bool) -> dict[str, Any]:
    return {
        "method": "cross-conformal: log-errors in units of the predicted spread and a floor, scored on rows that the scored "
        f"member had not trained on. {'Families, and jobs' if is_common else 'Jobs'} with and without cudnn.benchmark are "
        "ranked separately. Meant for jobs like the training jobs. The share above the bound, measured on held-out folds, "
        "stands in the report.",
        "coverages": list(classifier.coverages),
        "multiples": {mode: list(multiples) for mode, multiples in classifier.multiples.items()},
        "floor": classifier.added_spread,
    }


def _family_parts(
    data: LabelledJobs,
    range_log_scale: float,
    coverages: Sequence[float],
    calibration: LabelledJobs | None,
) -> dict[str, Any]:
    """Return the card's entries on one family, or on all together: support, fall-back, calibration
    of traced peaks."""
    options = {field: _seen(data, field) for field in SUPPORT_OPTION_FIELDS}
    range_columns = list(RANGE_COLUMNS)
    for field in COUNT_FIELDS:
        if len(options[field]) > MOST_OPTIONS:
            del options[field]  # the range below replaces a long list
            range_columns.append(field)
    columns = {column: data.features[:, FEATURE_NAMES.index(column)] for column in range_columns}
    parts: dict[str, Any] = {
        "support": {
            "options": options,
            "kinds": sorted(
                {data.jobs.kind_names[kind] for kind in np.unique(data.jobs.layer_kinds)}
            ),
            "ranges": {
                column: [float(values.min()), float(values.max())]
                for column, values in columns.items()
            },
        },
        "fallback": {
            "range_log_scale": range_log_scale,
            "range_method": "error of the closed form fitted to the smaller half of the training jobs, on the larger half",
            "option_log_scale": UNSEEN_OPTION_LOG_SCALE,
            "option_method": "assumed, not measured: half to double the closed form in 99 of 100 jobs",
        },
    }
    if data.family != ALL_FAMILIES:
        parts["reference"] = training_reference(data.jobs)
    if calibration is not None and calibration.provenance != TRACED:
        traced_peak = fit_traced_peak(calibration, coverages)
        if traced_peak is not None:
            seen = {field: _seen(calibration, field) for field in TRACED_OPTION_FIELDS}
            parts["traced_peak"] = traced_peak_card(traced_peak, calibration, seen)
    return parts


def _seen(data: LabelledJobs, field: str) -> list[Any]:
    if field in OPTION_FIELDS:
        values = set(data.jobs.option_column(field).tolist())
    else:
        values = {int(value) for value in data.jobs.column(field)}
        if field in UNSTATED_AS_ZERO and 0 in values:
            values = values - {0} | {None}
    return sorted(values, key=lambda value: (value is None, str(value)))


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
