"""Datasets of published runs of real models: each model is traced once and kept, and its parts are
computed at every batch size.

A campaign that is stopped continues in its folder.  When the trace's rules change, ``PROTOCOL`` in
:mod:`research.traces.labels` does, and the parts are computed again from the kept runs in
seconds a model; no model is traced again.
"""

from __future__ import annotations

import csv
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from gpumemnet.errors import DatasetError, GpumemnetError
from gpumemnet.extract import ExtractOptions
from gpumemnet.extract.extraction import extract_from
from gpumemnet.extract.module_calls import inputs_from_example
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import job_from_dict, job_to_dict
from gpumemnet.job.measurement import Measurement
from gpumemnet.site.implausible_rows import training_state_bytes
from gpumemnet.tracing.missing_values import GuessedValues
from research.published_tables import timm_models, xmem_models
from research.published_tables.real_runs import Reading, RealModel, RealRuns
from research.traces.kept_runs import traced_parts, with_prefetching

from .batch_scaling import ScalableRun, prime_for, scalable_run
from .kept_runs import KeptRuns, run_from_dict, run_to_dict
from .labels import PROTOCOL

SAMPLES: Final = 8
"""Batch size at which layers are extracted; they are counted per sample."""
STARTUP_SHARE: Final = 1.15
"""A reading whose allocator's part is this much above the traced steady state may have caught the
search for algorithms."""
STARTUP_TOLERANCE: Final = 0.05
"""How far a reading of the search may lie above its traced peak, as a share."""
_TABLES: Final = ((timm_models.COLUMNS, timm_models.read), (xmem_models.COLUMNS, xmem_models.read))


@dataclass(slots=True)
class Progress:
    """What a campaign has done: numbers of models, and of rows by what is known of them."""

    traced: int = 0
    left: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    rows: Counter[str] = field(default_factory=Counter)


def read_table(source: Path) -> RealRuns:
    """The models and readings of a published table; its columns tell which it is.

    Raises:
        DatasetError: the file is missing or no such table.
    """
    try:
        with source.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, strict=True))
    except OSError as error:
        raise DatasetError(f"{source} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(f"{source} is not CSV text: {error}") from None
    for columns, read in _TABLES:
        if rows and set(columns) <= set(rows[0]):
            return read(rows)
    raise DatasetError(
        f"{source} is no published table of real models: expected columns such as model, batch_size, measured_mib"
    )


def build_real_runs(
    source: Path, folder: Path, seconds: float | None, tell: Callable[[str], None]
) -> tuple[list[Measurement], Progress]:
    """Trace what is missing, as far as the time goes, and return the rows of the dataset.

    Args:
        source: the published table.
        folder: where traced runs are kept.
        seconds: time for traces and their parts; ``None`` for no limit.  Rows of models that it
            does not reach are left out, and rows whose parts it does not reach have their layers
            only.
        tell: called with one line for each model.

    Raises:
        DatasetError: the table or the folder cannot be read, or timm is of another version.
    """
    table, runs, progress = read_table(source), KeptRuns(folder), Progress()
    wanted: dict[str, list[Reading]] = {}
    for reading in table.readings:
        wanted.setdefault(reading.model, []).append(reading)
    end = None if seconds is None else time.monotonic() + seconds
    known: dict[tuple[str, tuple[int, str]], Mapping[str, Any]] = {}
    for model in table.models:
        document = runs.read(model.key) or {}
        if "run" not in document and _is_before(end):
            document = _document(model)
            runs.keep(model.key, document)
            progress.traced += "run" in document
            tell(f"{model.key}: {'failed' if 'error' in document else 'traced'}")
        if "error" in document:
            progress.failed[model.key] = document["error"]
        elif "run" not in document:
            progress.left += 1
        if "job" in document:
            parts = _parts(runs, model, document, wanted[model.key], end)
            known |= {
                (model.key, place): {"job": document["job"], "traced": each}
                for place, each in parts.items()
            }
    rows = list(_measurements(table.readings, known, progress))
    return _with_states(rows), progress


def _is_before(end: float | None) -> bool:
    return end is None or time.monotonic() < end


def _document(model: RealModel) -> dict[str, Any]:
    """The job, and the run at a prime batch size; ``error`` says what failed, and what was done
    before stays."""
    document: dict[str, Any] = {}
    try:
        network = model.build()
        options = ExtractOptions(**model.options.job_fields())
        example = model.sample(network, SAMPLES)
        inputs = inputs_from_example(example, None)
        document["job"] = job_to_dict(extract_from(network, inputs, options, GuessedValues()).job)
        tensors = [*network.parameters(), *network.buffers(), *_tensors(model.sample(network, 1))]
        prime = prime_for(dimension for tensor in tensors for dimension in tensor.shape)
        platform = model.platform(model.gpu)
        inputs = inputs_from_example(model.sample(network, prime), None)
        document["run"] = run_to_dict(scalable_run(network, inputs, model.options, platform))
    except DatasetError:
        raise
    except Exception as error:  # a model that the installed libraries cannot build or run
        name = "" if isinstance(error, GpumemnetError) else f"{type(error).__name__}: "
        document["error"] = f"{name}{error}"[:500]
    return document


def _tensors(example: Any) -> list[torch.Tensor]:
    return list(example.values()) if isinstance(example, dict) else [example]


def _parts(
    runs: KeptRuns,
    model: RealModel,
    document: Mapping[str, Any],
    readings: Sequence[Reading],
    end: float | None,
) -> dict[tuple[int, str], dict[str, int]]:
    """Traced parts by batch size and GPU; empty where the time did not suffice.  They are kept
    beside the run."""
    places = sorted({(reading.batch_size, reading.fields["gpu"]) for reading in readings})
    if "run" not in document:
        return {place: {} for place in places}
    kept = runs.read_parts(model.key, PROTOCOL)
    found = {place: kept[json.dumps(place)] for place in places if json.dumps(place) in kept}
    if len(found) < len(places) and _is_before(end):
        run = run_from_dict(document["run"])
        found |= {place: _parts_at(run, model, *place) for place in places if place not in found}
        runs.keep_parts(
            model.key, PROTOCOL, {json.dumps(place): parts for place, parts in found.items()}
        )
    return {place: found.get(place, {}) for place in places}


def _parts_at(run: ScalableRun, model: RealModel, batch_size: int, gpu: str) -> dict[str, int]:
    platform = model.platform(gpu)
    timeline, largest = run.at(batch_size, platform)
    return traced_parts(
        with_prefetching(timeline) if model.prefetches else timeline, largest, platform.device
    )


def _measurements(
    readings: Sequence[Reading],
    known: Mapping[tuple[str, tuple[int, str]], Mapping[str, Any]],
    progress: Progress,
) -> Iterator[Measurement]:
    for reading in readings:
        found = known.get((reading.model, (reading.batch_size, reading.fields["gpu"])))
        if found is None:
            progress.rows["left out: the model is not traced yet, or cannot be built"] += 1
            continue
        parts: dict[str, int] = found["traced"]
        progress.rows["with traced parts" if parts else "with layers only"] += 1
        job = replace(
            job_from_dict(found["job"]),
            batch_size=reading.batch_size,
            traced_peak_bytes=parts.get("steady_reserved_bytes"),
        )
        row = Measurement(
            job=job, traced=parts, traced_version=PROTOCOL if parts else None, **reading.fields
        )
        yield _with_possible_label(row)


def _with_possible_label(row: Measurement) -> Measurement:
    """``row``, with the status ``error`` where its label is below parameters, gradients and
    optimizer state."""
    label, state = row.label_bytes, int(training_state_bytes(JobTable.from_jobs([row.job]))[1][0])
    if label is None or label >= state:
        return row
    return replace(
        row,
        status="error",
        label_state=None,
        reason=f"the reading is below the {state:,} bytes of the training state",
    )


def _with_states(rows: Sequence[Measurement]) -> list[Measurement]:
    """``rows`` with the state that each label was read in, where ``cudnn.benchmark`` was on.

    What lies between reading and traced steady state, in the median of a GPU, is taken for its
    context.  A label is of the start-up if what it leaves above the context is more than 15 % above
    the traced steady state, and the traced peak of the start-up reaches it: a search passes through
    the workspaces of all algorithms.  The rule reads nothing but reading and trace.
    """
    contexts: dict[str, list[int]] = {}
    for row in rows:
        if row.label_bytes is not None and row.traced and row.job.cudnn_benchmark:
            contexts.setdefault(row.gpu, []).append(
                row.label_bytes - row.traced["steady_reserved_bytes"]
            )
    typical = {gpu: median(values) for gpu, values in contexts.items()}
    return [
        replace(row, label_state=_state(row, typical[row.gpu])) if _has_state(row) else row
        for row in rows
    ]


def _has_state(row: Measurement) -> bool:
    return row.label_bytes is not None and bool(row.traced) and row.job.cudnn_benchmark


def _state(row: Measurement, context_bytes: float) -> str:
    assert row.label_bytes is not None
    reserved = row.label_bytes - context_bytes
    steady, peak = row.traced["steady_reserved_bytes"], row.traced["startup_peak_reserved_bytes"]
    is_startup = STARTUP_SHARE * steady < reserved <= (1 + STARTUP_TOLERANCE) * peak
    return "startup" if is_startup else "steady"
