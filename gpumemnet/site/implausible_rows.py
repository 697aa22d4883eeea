"""Finds rows of a dataset that cannot be true, such as labels below the weights or reserved bytes
above those of the process.

The schema checks columns; this module compares the numbers of one row, of rows of one network, and
of rows of one GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from gpumemnet.job.dataset import Dataset
from gpumemnet.job.job_table import Array, JobTable
from gpumemnet.job.measurement import DEVICE_SOURCES, SOFTWARE, Measurement, job_texts
from gpumemnet.physics.element_types import ELEMENT_BYTES
from gpumemnet.physics.optimizers import optimizer_copies
from gpumemnet.units import MIB, format_bytes

if TYPE_CHECKING:
    import pandas as pd

MONOTONE_TOLERANCE_BYTES: Final = 64 * MIB
MONOTONE_TOLERANCE: Final = 0.05
"""A larger batch may take less by the larger of the two, because libraries choose other kernels and
workspaces."""
DEVICE_TOLERANCE_BYTES: Final = 256 * MIB
"""The driver's own share per process, which the device's reading holds and the process's does
not."""
FLOOR_TOLERANCE_BYTES: Final = 32 * MIB
MIN_GROUP: Final = 20
"""Rows of the same GPU and software that a typical value needs."""

_PROVENANCE: Final = ("driver", "cuda", "torch", "protocol", "seed", "seconds", "neighbours")
"""Fields that every measured row needs, whatever its outcome; ``allocator_settings`` and ``cudnn``
may be empty."""
_PROVENANCE_OK: Final = ("steps", "context_bytes", "peak_reserved_bytes")
"""Fields that a measured row needs, too, whose job did not run out of memory."""
_COMPARABLE: Final = ("family", "gpu", "driver", "torch", "label_source", "is_replica")

Found = Iterator[tuple[int, str, str]]
"""Position of a row, rule, sentence."""


@dataclass(frozen=True, slots=True)
class ImplausibleRow:
    """A row that cannot be true.

    Attributes:
        row: number of the row, from 1.
        rule: short name of the rule.
        sentence: what is wrong; names the other row where there is one.
    """

    row: int
    rule: str
    sentence: str

    def __str__(self) -> str:
        return f"row {self.row}: {self.rule}: {self.sentence}"


def implausible_rows(measurements: Sequence[Measurement]) -> list[ImplausibleRow]:
    """The implausible rows of a dataset, in order; a row appears once for each rule."""
    dataset = Dataset.from_measurements(measurements)
    frame = dataset.columns.drop_columns(["phases", "allocator", "traced"]).to_pandas()
    weights, state = training_state_bytes(dataset.jobs)
    unbatched = dataset.jobs.with_numbers("batch_size", np.ones(len(dataset)))
    frame = frame.assign(
        family=dataset.jobs.option_column("family"),
        is_replica=dataset.jobs.column("ranks") > 1,
        batch=dataset.jobs.column("batch_size"),
        unbatched=[*job_texts(unbatched)],
        label=dataset.label_bytes,
        weights=weights,
        state=state,
    )
    checks = (_contradictions, _incomplete, _not_monotone, _below_floor)
    found = sorted(one for check in checks for one in check(frame))
    return [ImplausibleRow(row + 1, rule, sentence) for row, rule, sentence in found]


def training_state_bytes(jobs: JobTable) -> tuple[Array, Array]:
    """Bytes that a training process holds at least: its weights; and these with gradients and
    optimizer state, shape ``[B]`` each."""
    names = (jobs.options(name) for name in ("precision", "optimizer", "optimizer_implementation"))
    of_options = [
        (ELEMENT_BYTES[precision].weight, 1 + optimizer_copies(*optimizer).state)
        for precision, *optimizer in zip(*names, strict=True)
    ]
    size, copies = np.array(of_options, np.float64).reshape(-1, 2)[jobs.option_codes].T
    weights = jobs.column("total_parameters") * size
    return weights, weights + np.floor(jobs.column("trainable_parameters") * size * copies)


def _contradictions(frame: pd.DataFrame) -> Found:
    """Contradictions between the numbers of one row."""
    frame = frame[frame.label.notna()]
    label, process, reserved = frame.label, frame.peak_process_bytes, frame.peak_reserved_bytes
    peak = frame.startup_peak_bytes.fillna(label)
    state = frame.state.where(label >= frame.weights)
    of_device = process.where(frame.label_source.isin(DEVICE_SOURCES))
    training = "weights, gradients and optimizer state take"
    for rule, name, amount, limit_name, limit in (
        ("below-weights", "the weights take", frame.weights, "the label", label),
        ("below-training-state", training, state, "the label", label),
        ("reserved-above-label", "peak_reserved_bytes is", reserved, "the label", peak),
        ("reserved-above-process", "peak_reserved_bytes is", reserved, "the process", of_device),
        (
            "allocated-above-reserved",
            "peak_allocated_bytes is",
            frame.peak_allocated_bytes,
            "reserved",
            reserved,
        ),
        ("above-capacity", "the label is", label, "the capacity", frame.capacity_bytes),
    ):
        for row in frame.index[amount > limit]:
            above = f"above {limit_name}, {format_bytes(limit[row])}"
            yield row, rule, f"{name} {format_bytes(amount[row])}, {above}"
    distance = frame.peak_device_bytes - process
    for row in frame.index[distance.abs() > DEVICE_TOLERANCE_BYTES]:
        sentence = f"the device's reading is {format_bytes(distance[row])} above the process's"
        yield row, "device-far-from-process", sentence


def _incomplete(frame: pd.DataFrame) -> Found:
    """Rows without their provenance, or that ran out of an unknown amount of memory."""
    is_oom, is_ok = frame.status == "oom", frame.status == "ok"
    for row in frame.index[is_oom & (frame.capacity_bytes < MIB)]:
        sentence = "the job ran out of memory, and the row does not state how much there was"
        yield row, "oom-without-capacity", sentence
    for row in frame.index[is_oom & (frame.neighbours > 0)]:
        yield row, "oom-with-neighbours", "ran out of memory beside other jobs, not alone"
    measured = frame[(frame.provenance == "measured") & (is_ok | is_oom)]
    missing = measured[[*_PROVENANCE, *_PROVENANCE_OK]].isna()
    missing.loc[measured.status == "oom", [*_PROVENANCE_OK]] = False
    for row in missing.index[missing.any(axis=1)]:
        names = ", ".join(missing.columns[missing.loc[row]])
        yield row, "missing-provenance", f"a measured row without {names}"


def _not_monotone(frame: pd.DataFrame) -> Found:
    """Rows that differ in the batch size alone, where the larger batch took clearly less than the
    smaller one took, or had when it ran out of memory."""
    frame = frame[frame.status.isin(("ok", "oom"))].sort_values("batch", kind="stable")
    key = ["unbatched", "architecture", "label_source", "label_state", *SOFTWARE]
    frame["needed"] = frame.label.fillna(frame.capacity_bytes)
    frame["most"] = frame.groupby(key, dropna=False).needed.cummax()
    most = frame.groupby(key, dropna=False).most.shift()
    tolerance = np.maximum(MONOTONE_TOLERANCE_BYTES, MONOTONE_TOLERANCE * most)
    for row in frame.index[frame.label + tolerance < most]:
        took = f"batch {frame.batch[row]:.0f} took {format_bytes(frame.label[row])}"
        yield row, "not-monotone", f"{took}, a smaller batch {format_bytes(most[row])} or more"


def _below_floor(frame: pd.DataFrame) -> Found:
    """Labels whose rest beside the training state is far below that of 95 % of similar rows: of the
    same family, GPU, software and label source, alone or replicas.  The reading missed the peak.

    Rows whose context was read do not count, nor do real models: they are networks of all sizes, so
    that a small one says nothing of a large one.
    """
    frame = frame[frame.label.notna()]
    is_made = frame.context_bytes.isna() & frame.architecture_family.isna()
    rest = (frame.label - frame.state).where(is_made)
    groups = rest.groupby([frame[name] for name in _COMPARABLE], dropna=False)
    usual = groups.transform("quantile", 0.05)
    is_far = (groups.transform("count") >= MIN_GROUP) & (usual - rest > FLOOR_TOLERANCE_BYTES)
    for row in frame.index[is_far & (rest >= 0)]:
        amounts = f"{format_bytes(rest[row])}, at similar rows {format_bytes(usual[row])} or more"
        yield row, "below-floor", f"the label beside the training state: {amounts}"
