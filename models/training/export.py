"""Exports a trained classifier to a bundle: ONNX graph, card, checksums."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from gpumemnet.data.measurement import PUBLISHED_GPU, TRACED
from gpumemnet.features.sequence import SEQUENCE_COLUMNS
from gpumemnet.features.vector import FEATURE_NAMES, FEATURE_SCHEMA
from gpumemnet.gpu.catalogue import blas_workspace_bytes
from gpumemnet.predict.bundle import GRAPH_OUTPUTS, Bundle, save_bundle
from gpumemnet.predict.bundle_card import ALL_FAMILIES, COMMON, FORMAT_VERSION
from gpumemnet.site.training_reference import reference_document, training_reference

from ..networks.mlp import float_tensor
from ..networks.served import SequenceClassifier
from .data import LabelledJobs
from .graph_export import export_graph
from .mlp import TrainedClassifier, TrainingPlan
from .sequence import SequencePlan, batch_of
from .traced_peak import fit_traced_peak, traced_peak_card

LIMITS: Final = (
    "Holds for the options, layer kinds and ranges under 'support'; beyond them the answer is the closed form, with safe bytes "
    "only where its calibration on real networks, under 'fallback', holds."
)
OPTION_FIELDS: Final = (
    *("optimizer", "optimizer_implementation", "precision", "checkpointing", "attention_kernel"),
    *("channels_last", "cudnn_benchmark", "gradient_accumulation", "sequence_length"),
)
"""Job fields whose values in the training data bound the model's support."""
COUNT_FIELDS: Final = ("sequence_length",)
"""Numeric options: the support lists a range if they have many values."""
MOST_OPTIONS: Final = 8
TRACED_OPTION_FIELDS: Final = ("precision", "checkpointing", "channels_last", "cudnn_benchmark")
"""Job fields that decide which kernels run; a trace can misjudge the scratch memory and fragmentation of these."""
RANGE_COLUMNS: Final = (
    *("batch_size", "input_elements", "total_parameters", "total_activations", "trainable_share"),
    *("input_bytes", "activation_bytes"),
)
"""Feature columns whose range in the training data bounds the model's support; totals are enough to compute them."""

LONGEST_EXAMPLE: Final = 7
"""Layers of the longest example sequence for the export of a graph."""
UNSEEN_OPTION_LOG_SCALE: Final = math.log(2.0) / math.log(0.995 / 0.005)
"""Scale of a logistic whose central 99 % reach from half to double, for options on which the closed form is untested."""

PUBLISHED_FILES: Final = {"mlp": "mlp_data_step2.csv", "cnn": "cnn_data_step1.csv", "transformer": "transformer_data.csv"}
"""Family → file of its published readings, below ``Datasets/``."""
TRACED_CREDIT: Final[Mapping[str, str]] = {
    "description": "training jobs drawn from this project's recipes, labelled by its trace: no GPU has run them",
    "source": "python -m dataset_builder trace-recipe",
    "licence": "Apache-2.0",
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
            "source": "https://github.com/itu-rad/GPUMemNet (Related_works/FakeTensor); gpumemnet build trace-real-jobs",
            "licence": "CC BY 4.0; Apache-2.0",
            "rows": int(data.is_real.sum()),
            "architecture_families": list(data.real_families),
        }
    }


def export_onnx(classifier: TrainedClassifier, data: LabelledJobs) -> bytes:
    """Return the classifier's serialised graph; batch dimension and, for sequences, number of layers are dynamic."""
    few = data.take(np.unique(np.linspace(0, len(data) - 1, 16).astype(int)))
    rows = np.concatenate((few.features, few.without_layers().features))
    example: tuple[torch.Tensor, ...] = (float_tensor(rows),)
    network = classifier.network
    key: tuple[Any, ...] = network.families
    shapes: dict[str, Any] = {"features_BF": {0: torch.export.Dim.DYNAMIC}}
    names = ["features"]
    if isinstance(network, SequenceClassifier):
        example += batch_of(_any_sequences(len(rows)))
        key = (*key, network.inputs.encoder.heads)
        free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        shapes |= {"sequences_BLF": free, "mask_BL": free}
        names += ["sequences", "mask"]
    return export_graph(
        network,
        example,
        inputs=names,
        outputs=GRAPH_OUTPUTS,
        dynamic_shapes=shapes,
        key=key,
    )


def _any_sequences(count: int) -> list[NDArray[np.float32]]:
    """Return random sequences of one to seven layers; attention over equal layers would not test the exported graph."""
    generator = np.random.default_rng(0)
    lengths = (LONGEST_EXAMPLE - row % LONGEST_EXAMPLE for row in range(count))
    return [generator.standard_normal((length, len(SEQUENCE_COLUMNS)), dtype=np.float32) for length in lengths]


def save_classifier(
    folder: str | Path,
    classifier: TrainedClassifier,
    data: LabelledJobs,
    plan: TrainingPlan | SequencePlan,
    *,
    name: str,
    version: str,
    metrics: Sequence[Mapping[str, Any]] = (),
    traces: LabelledJobs | Mapping[str, LabelledJobs] | None = None,
) -> Bundle:
    """Write the bundle of ``classifier``, trained on ``data``, to ``folder``, atomically.

    Args:
        folder: the bundle's folder.
        classifier: the trained model.
        data: the training data, which determines support and provenance; those of one family give a bundle for this family.
        plan: the training plan.
        name: the model's name.
        version: the model's version.
        metrics: rows of the evaluation table, measured on held-out folds.
        traces: measured jobs with traced peaks, by family for a common model, that calibrate the answers for traced peaks;
            ``data`` by default.

    Raises:
        BundleError: when ``folder`` exists and is no bundle.
    """
    if isinstance(traces, LabelledJobs):
        traces = {traces.family: traces}
    calibration = dict(traces or {})
    by_family: dict[str, Any] = {}
    for family, scale in classifier.range_log_scales.items() if data.family == ALL_FAMILIES else ():
        own = data.take(data.rows_of(family))
        counts = {"rows": len(own), "architectures": len(np.unique(own.groups))}
        by_family[family] = counts | _family_parts(own, scale, classifier.coverages, calibration.get(family, own))
    log_scale = classifier.range_log_scales.get(data.family, classifier.range_log_scale)
    traces_of_all = None if by_family else calibration.get(data.family, data)
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
        "training_data": {
            **_credit(data),
            **_real_networks(data),
            "rows": len(data),
            "architectures": len(np.unique(data.groups)),
            "provenance": data.provenance,
            "label_source": data.label_source,
            "sha256": data.sha256,
        },
        "conformal": {
            "method": "cross-conformal: log-errors in units of the predicted spread and a floor, scored on rows that the scored "
            f"member had not trained on. {'Families, and jobs' if by_family else 'Jobs'} with and without cudnn.benchmark, are "
            "ranked separately. Meant for jobs like the training jobs. The share above the bound, measured on held-out folds, "
            "stands in the report.",
            "coverages": list(classifier.coverages),
            "multiples": {mode: list(multiples) for mode, multiples in classifier.multiples.items()},
            "floor": classifier.floor,
        },
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
        card["training_data"]["sha256_method"] = "over the hashes of the families' dataset files, one a line"
    return save_bundle(folder, export_onnx(classifier, data), card)


def _encoder(classifier: TrainedClassifier, family: str) -> str:
    if family == ALL_FAMILIES:
        return COMMON
    return "transformer" if isinstance(classifier.network, SequenceClassifier) else "mlp"


def _family_parts(
    data: LabelledJobs, range_log_scale: float, coverages: Sequence[float], calibration: LabelledJobs | None
) -> dict[str, Any]:
    """Return the card's entries on one family, or on all together: support, fall-back, calibration of traced peaks."""
    options = {field: _seen(data, field) for field in OPTION_FIELDS}
    range_columns = list(RANGE_COLUMNS)
    for field in COUNT_FIELDS:
        if len(options[field]) > MOST_OPTIONS:
            del options[field]  # the range below replaces a long list
            range_columns.append(field)
    columns = {column: data.features[:, FEATURE_NAMES.index(column)] for column in range_columns}
    parts: dict[str, Any] = {
        "support": {
            "options": options,
            "kinds": sorted({layer.kind for job in data.jobs for layer in job.layers}),
            "ranges": {column: [float(values.min()), float(values.max())] for column, values in columns.items()},
        },
        "fallback": {
            "range_log_scale": range_log_scale,
            "range_method": "error of the closed form fitted to the smaller half of the training jobs, on the larger half",
            "option_log_scale": UNSEEN_OPTION_LOG_SCALE,
            "option_method": "assumed, not measured: half to double the closed form in 99 of 100 jobs",
        },
    }
    if data.family != ALL_FAMILIES:
        parts["reference"] = reference_document(training_reference(data.jobs))
    if calibration is not None and calibration.provenance != TRACED:
        traced_peak = fit_traced_peak(calibration, coverages)
        if traced_peak is not None:
            seen = {field: _seen(calibration, field) for field in TRACED_OPTION_FIELDS}
            parts["traced_peak"] = traced_peak_card(traced_peak, calibration, seen)
    return parts


def _seen(data: LabelledJobs, field: str) -> list[Any]:
    return sorted({getattr(job, field) for job in data.jobs}, key=lambda value: (value is None, str(value)))
