"""The bundle of a trained classifier: its graph, in ONNX, and its card, which says what it answers
for, what it learned from, and how its bounds were calibrated.

Beside the network's bounds two things are calibrated here.  Outside the support, bounds widen by
what the line missed of whole sources that it had not seen.  And a job with a traced peak is answered
by that peak: the bound is the conformal quantile of the ratio of label and traced peak over
measured rows, and holds for jobs like those, so the card lists their options.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor

from gpumemnet.atomic_files import Document
from gpumemnet.job.measurement import TRACED
from gpumemnet.job.training_job import OPTION_FIELDS, UNSTATED_AS_ZERO
from gpumemnet.predict.bundle import GRAPH_OUTPUTS, Bundle, save_bundle
from gpumemnet.predict.bundle_card import FORMAT_VERSION
from gpumemnet.predict.conformal import COVERAGES, FEWEST_SCORES, conformal_bounds
from gpumemnet.predict.features import FEATURE_NAMES, FEATURE_SCHEMA, SEQUENCE_COLUMNS
from gpumemnet.predict.prediction import OF_THE_SITE
from gpumemnet.predict.predictor import SLACK_BYTES
from gpumemnet.predict.support import other_shares

from ..networks.line import GROUP_NAMES
from .classifier import TrainedClassifier, batch_of, fitted_inputs, float_tensor
from .data import LabelledJobs, families_of, folds, source_splits

SUPPORT_OPTION_FIELDS: Final = (
    *("optimizer", "optimizer_implementation", "precision", "checkpointing", "attention_kernel"),
    *("channels_last", "cudnn_benchmark"),
)
"""Job fields whose values in the training data bound the model's support."""
RANGE_COLUMNS: Final = (
    *("input_elements", "total_parameters", "total_activations", "trainable_share"),
    *("sequence_length", "gradient_accumulation", "layer_count"),
)
"""Feature columns whose range in the training data bounds the model's support; none grows with the
batch size."""
TRACED_OPTION_FIELDS: Final = ("precision", "checkpointing", "channels_last", "cudnn_benchmark")
"""Job fields that decide which kernels run; a trace can misjudge the scratch memory and
fragmentation of these."""
LIMITS: Final = (
    "Holds for the options, layer kinds and ranges under 'support'. Beyond them bounds are wider by "
    "what was missed of sources that were left out, and there is none where a job's layers are unknown."
)
CREDITS: Final[Mapping[str, str]] = {
    "published": "Readings by the authors of GPUMemNet (IT University of Copenhagen, itu-rad; "
    "arXiv 2602.17817) and of xMem, see dataset_builder/datasets/README.md",
    "traced": "jobs labelled by this project's trace: no GPU has run them",
}
CENTRAL_WEIGHT: Final = 0.9
_CENTRAL_SHARE: Final = 0.5
_TAIL_SHARE: Final = 0.95


def save_classifier(
    folder: str | Path,
    classifier: TrainedClassifier,
    data: LabelledJobs,
    *,
    name: str,
    version: str,
    **further: Any,
) -> Bundle:
    """Write the bundle of ``classifier``, trained on ``data``, to ``folder``, atomically.

    Args:
        folder: the bundle's folder.
        classifier: the trained model.
        data: the training data, which determines support and provenance.
        name, version: of the model.
        further: further members of the card.

    Raises:
        BundleError: when ``folder`` exists and is no bundle.
    """
    families = families_of(data)
    of_family = {
        family: data.take(data.jobs.option_column("family") == family) for family in families
    }
    is_run = data.provenances != TRACED
    names, counts = np.unique(data.gpus[is_run] if is_run.any() else data.gpus, return_counts=True)
    inputs = classifier.network.inputs
    bounds = zip(GROUP_NAMES, classifier.scored_rows, classifier.multiples, strict=True)
    card = {
        "format_version": FORMAT_VERSION,
        "name": name,
        "version": version,
        "families": list(families),
        "encoder": classifier.plan.encoder,
        "gpu": str(names[counts.argmax()]),
        "contexts": _contexts(data),
        "feature_schema": FEATURE_SCHEMA,
        "intended_use": f"Memory of {', '.join(families)} training jobs on one GPU, before they start, for "
        "schedulers and batch prediction.",
        "limits": LIMITS,
        "training_data": _training_data(data),
        "support": _support(data),
        "line": {
            "method": "median regression over the closed form, fixed in training",
            "slopes": inputs.line.slopes.flatten().tolist(),
            "totals_slopes": inputs.line.totals_slopes.flatten().tolist(),
            "log_shifts": dict(zip(GROUP_NAMES, inputs.shifts.flatten().tolist(), strict=True)),
            "log_errors": dict(zip(GROUP_NAMES, inputs.units.flatten().tolist(), strict=True)),
        },
        "conformal": {
            "method": "cross-conformal by group: log-errors in units of the predicted spread and a floor, of "
            "architecture families that the scored network had not seen",
            "coverages": list(COVERAGES),
            "widenings": list(widenings(data)),
            "widening_method": "what lines that were fitted without a source missed of it, beyond its group's bound",
            "floor": classifier.added_spread,
            "groups": {
                group: {"rows": int(rows), "multiples": multiples.tolist()}
                for group, rows, multiples in bounds
            },
        },
        "traced_peaks": {
            family: found
            for family, own in of_family.items()
            if (found := traced_peak(own)) is not None
        },
        "training": {**asdict(classifier.plan), "torch": torch.__version__.split("+")[0]},
        **further,
    }
    return save_bundle(folder, export_classifier(classifier, data), card)


def _contexts(data: LabelledJobs) -> dict[str, int]:
    """GPU → CUDA context in the readings of whoever uses the GPU."""
    is_own = np.isin(data.provenances, OF_THE_SITE)
    return {
        gpu: int(np.median(data.context_bytes[is_own & (data.gpus == gpu)]))
        for gpu in sorted({*data.gpus[is_own].tolist()})
    }


def _training_data(data: LabelledJobs) -> Document:
    sources = {
        name: {"rows": int((data.sources == name).sum()), "sha256": digest}
        for name, digest in data.files.items()
    }
    provenances = sorted({*data.provenances.tolist()})
    return {
        "description": f"{len(data):,} jobs of {len(set(data.groups.tolist())):,} architecture families, memory above the "
        "CUDA context. " + "; ".join(CREDITS[one] for one in provenances if one in CREDITS),
        "licence": "CC BY 4.0; Apache-2.0" if "published" in provenances else None,
        "provenance": ", ".join(provenances),
        "label_source": ", ".join(sorted({*data.label_sources.tolist()})),
        "rows": len(data),
        "sources": sources,
    }


def _support(data: LabelledJobs) -> Document:
    jobs = data.jobs
    columns = {name: data.features[:, FEATURE_NAMES.index(name)] for name in RANGE_COLUMNS}
    stated = {
        name: values[values > 0] if name in ("sequence_length", "layer_count") else values
        for name, values in columns.items()
    }
    return {
        "options": {field: _seen(data, field) for field in SUPPORT_OPTION_FIELDS},
        "kinds": sorted({jobs.kind_names[kind] for kind in np.unique(jobs.layer_kinds)}),
        "ranges": {
            name: [float(values.min()), float(values.max())]
            for name, values in stated.items()
            if len(values)
        },
        "other_share": float(other_shares(jobs).max()),
    }


def _seen(data: LabelledJobs, field: str) -> list[Any]:
    if field in OPTION_FIELDS:
        values = set(data.jobs.option_column(field).tolist())
    else:
        values = {int(value) for value in data.jobs.column(field)}
        if field in UNSTATED_AS_ZERO and 0 in values:
            values = values - {0} | {None}
    return sorted(values, key=lambda value: (value is None, str(value)))


def widenings(data: LabelledJobs) -> tuple[float, ...]:
    """By how much bounds widen outside the support, in log-bytes, for each of the coverages.

    Every source that bounds are calibrated on is left out in turn, or every fold of the families
    where there is one source only.  A line is fitted to the others, with bounds of each group.  The
    widening is the conformal quantile of what the left-out rows exceed these bounds by.
    """
    usable = data.take(data.is_measured & data.calibrates)
    if len(usable) < 2 * FEWEST_SCORES:
        usable = data.take(data.is_measured)
    beyond = []
    for training, left_out in [*source_splits(usable)] or folds(usable.groups, 2, seed=0):
        known = usable.take(training)
        inputs = fitted_inputs(known, known.without_layers())
        parts = []
        for part in (known, usable.take(left_out)):
            with torch.no_grad():
                _, centre, _, groups = inputs(float_tensor(part.features))
            errors = np.log(part.label_bytes + SLACK_BYTES) - centre[:, 0].double().numpy()
            parts.append((errors, groups.argmax(1).numpy()))
        (errors, codes), (missed, asked) = parts
        bounds = np.array([conformal_bounds(errors, COVERAGES)] * len(GROUP_NAMES))
        for code in set(codes.tolist()):
            own = errors[codes == code]
            if len(own) >= FEWEST_SCORES:
                bounds[code] = conformal_bounds(own, COVERAGES)
        beyond.append(missed[:, None] - bounds[asked])
    excess = np.concatenate(beyond)
    found = [conformal_bounds(excess[:, at], (level,))[0] for at, level in enumerate(COVERAGES)]
    return tuple(np.maximum.accumulate(np.maximum(found, 0.0)).tolist())


def traced_peak(data: LabelledJobs) -> Document | None:
    """Calibrate answers for jobs that state a traced peak, on the rows of one family that a GPU has
    run; ``None`` without such rows."""
    traced = data.jobs.column("traced_peak_bytes")
    own = data.take((traced > 0) & data.is_measured & (data.provenances != TRACED))
    if len(own) < FEWEST_SCORES:
        return None
    traced = own.jobs.column("traced_peak_bytes")
    errors = np.log((own.label_bytes + SLACK_BYTES) / (traced + SLACK_BYTES))
    bounds = conformal_bounds(errors, COVERAGES, least=0.0)
    shift = float(np.median(errors))
    distances = np.abs(errors - shift)
    # a logistic of scale s has half of its mass within s log 3 of the centre, and 95 % within s log
    # 39
    central = max(float(np.quantile(distances, _CENTRAL_SHARE)) / math.log(3.0), 1e-4)
    tail = max(float(np.quantile(distances, _TAIL_SHARE)) / math.log(39.0), 2.0 * central)
    return {
        "weights": [CENTRAL_WEIGHT, 1.0 - CENTRAL_WEIGHT],
        "log_scales": [central, 3.0 * tail],
        "log_shift": shift,
        "log_bounds": list(bounds),
        "options": {field: _seen(own, field) for field in TRACED_OPTION_FIELDS},
        "rows": len(own),
        "method": "measured memory above the context over the traced peak, both with 256 MiB added: its median, "
        "two logistics, conformal quantiles",
    }


# The graph.

TOLERANCE: Final = 1e-4
"""Largest absolute and relative difference between the outputs of a network and of its graph."""
LONGEST_EXAMPLE: Final = 7
"""Layers of the longest example sequence."""


def export_classifier(classifier: TrainedClassifier, data: LabelledJobs) -> bytes:
    """Return the classifier's serialised graph; batch dimension and, for sequences, number of
    layers are dynamic.

    Args:
        classifier: the trained model.
        data: its training data, for example inputs.

    Raises:
        RuntimeError: when the graph gives other outputs than the network.
    """
    few = data.take(np.unique(np.linspace(0, len(data) - 1, 16).astype(int)))
    rows = np.concatenate((few.features, few.without_layers().features))
    example: dict[str, Tensor] = {"features": float_tensor(rows)}
    shapes: tuple[Any, ...] = ({0: torch.export.Dim.DYNAMIC},)
    if classifier.plan.encoder == "transformer":
        # attention over equal layers would not test the exported graph
        generator = np.random.default_rng(0)
        lengths = (LONGEST_EXAMPLE - row % LONGEST_EXAMPLE for row in range(len(rows)))
        size = len(SEQUENCE_COLUMNS)
        random = [generator.standard_normal((length, size), np.float32) for length in lengths]
        example["sequences"], example["mask"] = batch_of(random)
        free = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
        shapes = *shapes, (free, free)
    model = _run_exporter(classifier.network, example, shapes)
    graph = bytes(model.SerializeToString())
    with torch.no_grad():
        expected = classifier.network(*example.values())
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    given = session.run(
        list(GRAPH_OUTPUTS), {name: value.numpy() for name, value in example.items()}
    )
    for name, ours, theirs in zip(GRAPH_OUTPUTS, expected, given, strict=True):
        if not np.allclose(ours.numpy(), theirs, rtol=TOLERANCE, atol=TOLERANCE):
            raise RuntimeError(f"the exported graph gives other {name} than the network")
    return graph


def _run_exporter(
    network: torch.nn.Module, example: dict[str, Tensor], shapes: tuple[Any, ...]
) -> onnx.ModelProto:
    exporter_log = logging.getLogger("torch.onnx")
    level = exporter_log.level
    exporter_log.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter uses deprecated functions of torch
            program = torch.onnx.export(
                network,
                tuple(example.values()),
                input_names=list(example),
                output_names=list(GRAPH_OUTPUTS),
                dynamic_shapes=shapes,
                dynamo=True,
                verbose=False,
            )
    finally:
        exporter_log.setLevel(level)
    assert program is not None
    model = program.model_proto
    for entry in (
        model,
        model.graph,
        *model.graph.node,
        *model.graph.value_info,
        *model.graph.input,
        *model.graph.output,
    ):
        del entry.metadata_props[:]  # the exporter adds stack traces, which hold local paths
    return model
