"""The estimates for each row: the trace, a trace without corrections, and lines through them.

A line is fitted on the other folds by least squares.  Its bound is the ratio that covers 99 % of
their rows.  A fold holds whole architectures.  "Raw FakeTensor" is the allocated peak of a run on
meta tensors, which equals that of PyTorch's MemTracker under FakeTensorMode byte for byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.gpu.catalogue import DeviceProfile, context
from gpumemnet.physics.element_types import ELEMENT_BYTES
from gpumemnet.tracing.memory import steady_memory
from gpumemnet.tracing.timeline import peak_of
from gpumemnet.tracing.training_loop import record
from research.traces.subjects import Subject

FOLDS: Final = 5
COVERAGE: Final = 0.99

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRow:
    """One measured row and its traces, in bytes.

    Attributes:
        family, architecture_key, precision, optimizer, recipe: of the row.
        label_bytes: measured process bytes.
        measured_reserved_bytes: measured reserved bytes, where the row has them.
        reserved_bytes: of the trace, with expected scratch memory.
        bound_bytes: safe bytes of the trace, context included.
        fake_tensor_bytes: allocated peak without corrections.
        parameter_bytes, activation_bytes: the two numbers of calibrated physics.
        seconds: of the trace.
    """

    family: str
    architecture_key: str
    precision: str
    optimizer: str
    recipe: str
    label_bytes: int
    measured_reserved_bytes: int | None
    reserved_bytes: int
    bound_bytes: int
    fake_tensor_bytes: int
    parameter_bytes: int
    activation_bytes: int
    seconds: float

    @property
    def fold(self) -> int:
        """Fold of the row's architecture."""
        return int(hashlib.sha256(self.architecture_key.encode()).hexdigest(), 16) % FOLDS


@dataclass(frozen=True, slots=True, eq=False)
class Estimates:
    """One estimator's answers, shape ``[B]`` each.

    Attributes:
        name: name of the estimator.
        expected_bytes: the expected memory.
        safe_bytes: the bound; NaN where the estimator gives none.
    """

    name: str
    expected_bytes: Array
    safe_bytes: Array


def traced_row(subject: Subject, clock: Callable[[], float]) -> TracedRow:
    """Trace ``subject`` with and without corrections.

    Raises:
        ExtractError: when it cannot be traced.
    """
    start = clock()
    recording = record(subject.network, subject.inputs, subject.options, subject.platform)
    timeline, device = recording.timeline, subject.platform.device
    memory = steady_memory(timeline, device)
    seconds = clock() - start
    plain_options = replace(
        subject.options,
        optimizer_implementation="for_loop",
        precision=_without_autocast(subject.options.precision),
        last_batch_size=None,
        forward_passes_first=0,
    )
    uncorrected = record(
        subject.network, subject.inputs, plain_options, subject.platform, corrected=False
    ).timeline
    tensors = [
        0 if storage.memory_class == "workspace" else storage.size_bytes
        for storage in uncorrected.storages
    ]
    measurement, job = subject.measurement, subject.measurement.job
    assert measurement.label_bytes is not None
    element = ELEMENT_BYTES[job.precision]
    return TracedRow(
        family=job.family,
        architecture_key=measurement.architecture_key,
        precision=job.precision,
        optimizer=job.optimizer,
        recipe=measurement.recipe,
        label_bytes=measurement.label_bytes,
        measured_reserved_bytes=measurement.peak_reserved_bytes,
        reserved_bytes=memory.replayed.reserved_bytes,
        bound_bytes=memory.safe_bytes,
        fake_tensor_bytes=peak_of(uncorrected, tensors)[0],
        parameter_bytes=(job.total_parameters or 0) * element.weight,
        activation_bytes=(job.total_activations or 0) * job.batch_size * element.activation,
        seconds=seconds,
    )


def estimates(rows: Sequence[TracedRow], device: DeviceProfile) -> list[Estimates]:
    """Every estimator on ``rows`` of one family and one GPU; what is fitted is fitted on the other
    folds."""
    columns = {
        name: np.array([getattr(row, name) for row in rows], dtype=np.float64) for name in _COLUMNS
    }
    folds = np.array([row.fold for row in rows])
    labels, ones = columns["label_bytes"], np.ones(len(rows))
    gpu_context = context(device)
    reserved = columns["reserved_bytes"]
    return [
        _fitted(
            "median of the other folds",
            labels,
            folds,
            lambda train: np.full(len(rows), np.median(labels[train])),
        ),
        _line(
            "calibrated physics: line in two numbers",
            labels,
            folds,
            [columns["parameter_bytes"], columns["activation_bytes"], ones],
        ),
        Estimates("raw FakeTensor", columns["fake_tensor_bytes"], np.full(len(rows), np.nan)),
        _line("FakeTensor, affine", labels, folds, [columns["fake_tensor_bytes"], ones]),
        Estimates("trace", reserved + gpu_context.expected_bytes, columns["bound_bytes"]),
        _fitted(
            "trace, context of the other folds",
            labels,
            folds,
            lambda train: reserved + np.median((labels - reserved)[train]),
        ),
    ]


_COLUMNS: Final = (
    *(
        "label_bytes",
        "reserved_bytes",
        "bound_bytes",
        "fake_tensor_bytes",
        "parameter_bytes",
        "activation_bytes",
    ),
)


def _line(name: str, labels: Array, folds: NDArray[np.int64], terms: list[Array]) -> Estimates:
    inputs = np.stack(terms, axis=1)

    def predict(train: NDArray[np.bool_]) -> Array:
        slopes, *_ = np.linalg.lstsq(inputs[train], labels[train], rcond=None)
        line: Array = inputs @ slopes
        return line

    return _fitted(name, labels, folds, predict)


def _fitted(
    name: str,
    labels: Array,
    folds: NDArray[np.int64],
    predict: Callable[[NDArray[np.bool_]], Array],
) -> Estimates:
    """Answers for each fold from a fit on the others, with the ratio that covers 99 % of those
    others as the bound."""
    expected, safe = np.empty(len(labels)), np.empty(len(labels))
    for fold in range(FOLDS):
        train, held_out = folds != fold, folds == fold
        if not train.any() or not held_out.any():
            train = np.ones(len(labels), dtype=bool) if not train.any() else train
        answers = predict(train)
        expected[held_out] = answers[held_out]
        ratios = np.sort(labels[train] / np.maximum(answers[train], 1.0))
        rank = min(len(ratios) - 1, int(np.ceil(COVERAGE * (len(ratios) + 1))) - 1)
        safe[held_out] = answers[held_out] * ratios[rank]
    return Estimates(name, expected, safe)


def _without_autocast(precision: str) -> str:
    return "bf16" if precision == "bf16" else "fp32"
