"""A measurement: one training job, run once on one GPU, with the memory it took and how it ended.

The label is kept in its parts (driver, allocator, context), because reserved bytes are the same on
other GPUs and drivers and context bytes are not.  A measurement also holds the network's
parameters, so that a row can be measured again years later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

import numpy as np

from gpumemnet.atomic_files import Document
from gpumemnet.errors import DatasetError, InvalidJobError
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.json_codec import job_from_dict, job_to_dict
from gpumemnet.job.layers import MAX_ELEMENTS, check_count, describe
from gpumemnet.job.training_job import JOB_FIELDS, TOTAL_FIELDS, TrainingJob

STATUSES: Final = ("ok", "oom", "timeout", "error")
TRACED: Final = "traced"
"""Provenance and label source of rows that were not measured: the label is the expectation of a
trace."""
PUBLISHED: Final = "published"
"""Provenance of readings that others published."""
PROCESS_SOURCES: Final = ("nvml_accounting", "nvml_process", TRACED)
"""Label sources that read the process."""
DEVICE_SOURCES: Final = ("nvml_device_difference", "nvidia_smi_device_1s")
"""Label sources that read the whole device."""
SITE_PROCESS_SOURCES: Final = ("slurm_gpumem",)
"""Readings of the process every few seconds, by schedulers and monitors; a short peak may be
missed."""
SITE_DEVICE_SOURCES: Final = ("dcgm", "prometheus")
"""The same for the whole device, other processes included: see
:data:`gpumemnet.site.observations.SOURCES`."""
LABEL_SOURCES: Final = PROCESS_SOURCES + DEVICE_SOURCES + SITE_PROCESS_SOURCES + SITE_DEVICE_SOURCES
OBSERVED: Final = "observed"
"""Provenance of rows from a site: the memory of a finished job, as its scheduler reported it."""
PROVENANCES: Final = ("measured", PUBLISHED, TRACED, OBSERVED, "stand_in")
"""``stand_in`` marks rows of a rehearsal without a GPU; no dataset accepts them."""

LABEL_STATES: Final = ("steady", "startup")
"""What a label was read in: the steady state, or the search for algorithms in the first steps."""

TRACED_PARTS: Final = (
    *("steady_reserved_bytes", "startup_peak_reserved_bytes", "steady_allocated_bytes"),
    *("largest_convolution_workspace_bytes", "largest_convolution_search_bytes"),
)
"""Parts of a traced job, none with the CUDA context: reserved bytes in the steady state and at the
start-up's peak, allocated bytes in the steady state, and the largest workspace of a convolution, as
chosen and as tried by ``cudnn.benchmark``."""

COUNT_COLUMNS: Final = (
    *("capacity_bytes", "steady_process_bytes", "startup_peak_bytes", "peak_process_bytes"),
    *("peak_device_bytes", "peak_reserved_bytes", "peak_allocated_bytes", "context_bytes"),
    *("steps", "seed", "neighbours"),
)
MAX_BYTES: Final = 2 * MAX_ELEMENTS


@dataclass(frozen=True, slots=True)
class Phase:
    """Memory at the end of one phase of a run (``context``, ``build``, ``forward``, ``backward``,
    ``step_1``, ``step_2`` …).

    Attributes:
        name: the phase.
        allocated_bytes, reserved_bytes: the caching allocator's state at the end of the phase.
        peak_allocated_bytes, peak_reserved_bytes: its maxima within the phase.
        process_bytes: NVML's reading of the process after the phase, where there is one.
        device_bytes: NVML's reading of the whole device after the phase.
    """

    name: str
    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    process_bytes: int | None = None
    device_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One job run on one GPU.

    Attributes:
        job: the job as a scheduler knows it.
        status: ``ok``, ``oom`` (memory > ``capacity_bytes``), ``timeout`` or ``error``.
        label_source: one of :data:`LABEL_SOURCES`.
        capacity_bytes: device memory that was free for the job when it ran alone.
        provenance: ``measured``, ``published``, ``traced`` or ``observed``.
        gpu: the GPU's name as the driver gives it.
        recipe: name of the search space, so that test-only sets (a zoo of real models) stay apart.
        architecture: JSON object with every parameter of the network; rebuilds it.
        options: JSON object with the options of the run that the job has no field for (share of
            frozen layers …).
        architecture_key: hash of the layer structure; datasets are split by it, unless a row has an
            ``architecture_family``.
        architecture_family: group of networks that a split keeps together, such as all ResNets.
        reason: why the job did not end ``ok``.
        steady_process_bytes: memory of the process in the steady state, at the end of the last step
            and with the context; the label wherever it is known.
        startup_peak_bytes: the most that the process took at any moment, cuDNN's search included:
            the allocator's largest reserved bytes and the context.
        peak_process_bytes: NVML's per-process used memory, maximum over the run.
        peak_device_bytes: NVML's device used memory minus its idle reading, maximum over the run.
        label_state: which state the label is of, one of :data:`LABEL_STATES`; ``None`` where nobody
            has looked.
        peak_reserved_bytes, peak_allocated_bytes: the caching allocator's maxima.
        traced: what the trace expects of the job, in bytes, by the names of :data:`TRACED_PARTS`;
            empty where it was not traced.
        traced_version: version of the trace that gave ``traced``.
        context_bytes: process minus reserved bytes after the last step.
        phases: readings in the order of the run.
        allocator: the caching allocator's statistics at the end of the run.
        steps, seconds, seed: length and seed of the run.
        neighbours: most jobs that shared the GPU with this one at any time.
        protocol: version of the training loop and of the reading convention.
        driver, cuda, cudnn, torch, allocator_settings: the software stack.

    Raises:
        DatasetError: on a value that no measurement can have.
    """

    job: TrainingJob
    status: str
    label_source: str
    capacity_bytes: int
    provenance: str
    gpu: str
    recipe: str
    architecture: str
    options: str = "{}"
    architecture_key: str = ""
    architecture_family: str | None = None
    reason: str | None = None
    label_state: str | None = None
    steady_process_bytes: int | None = None
    startup_peak_bytes: int | None = None
    peak_process_bytes: int | None = None
    peak_device_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    traced: Mapping[str, int] = field(default_factory=dict)
    traced_version: str | None = None
    context_bytes: int | None = None
    phases: tuple[Phase, ...] = ()
    allocator: Mapping[str, int] = field(default_factory=dict)
    steps: int | None = None
    seconds: float | None = None
    seed: int | None = None
    neighbours: int | None = None
    protocol: str | None = None
    driver: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    torch: str | None = None
    allocator_settings: str | None = None

    def __post_init__(self) -> None:
        for name in COUNT_COLUMNS:
            value = getattr(self, name)
            if value is not None or name == "capacity_bytes":
                try:
                    object.__setattr__(self, name, check_count(value, name, maximum=MAX_BYTES))
                except InvalidJobError as error:
                    raise DatasetError(str(error)) from None
        has_label = self.label_bytes is not None
        check_states(self.status, self.label_source, self.provenance, self.label_state, has_label)
        if set(self.traced) - set(TRACED_PARTS):
            raise DatasetError(
                f"traced has the parts {', '.join(TRACED_PARTS)}, not {describe(sorted(self.traced))}"
            )
        key = architecture_key(self.job)
        if self.architecture_key not in ("", key):
            raise DatasetError(
                f"architecture_key is {describe(self.architecture_key)}, but the layers give '{key}'"
            )
        object.__setattr__(self, "architecture_key", key)

    @property
    def split_group(self) -> str:
        """What a split never divides: the family of the architecture where it is known, else the
        architecture."""
        return self.architecture_family or self.architecture_key

    @property
    def label_bytes(self) -> int | None:
        """The label: the steady state where it is known, else the peak that the source reads;
        ``None`` unless ``ok``."""
        if self.status != "ok":
            return None
        if self.steady_process_bytes is not None:
            return self.steady_process_bytes
        return getattr(self, label_column(self.label_source))


def label_column(label_source: str) -> str:
    """The field that holds the label of this source where the steady state is not known."""
    of_process = label_source in PROCESS_SOURCES + SITE_PROCESS_SOURCES
    return "peak_process_bytes" if of_process else "peak_device_bytes"


STATE_COLUMNS: Final = ("status", "label_source", "provenance", "label_state")


def check_states(
    status: str, label_source: str, provenance: str, label_state: str | None, has_label: bool
) -> None:
    """Checks the values of :data:`STATE_COLUMNS` of one measurement, and that they go together.

    Raises:
        DatasetError: says which value is wrong.
    """
    for name, value, choices in (
        ("status", status, STATUSES),
        ("label_source", label_source, LABEL_SOURCES),
        ("provenance", provenance, PROVENANCES),
        ("label_state", label_state, (*LABEL_STATES, None)),
    ):
        if value not in choices:
            known = ", ".join(filter(None, choices))
            raise DatasetError(f"{name} must be one of {known}, not {describe(value)}")
    if (provenance == TRACED) != (label_source == TRACED):
        raise DatasetError(
            "a traced row has both provenance and label_source 'traced', and no other row has either"
        )
    if label_source in SITE_PROCESS_SOURCES + SITE_DEVICE_SOURCES and provenance != OBSERVED:
        raise DatasetError(
            f"a row with label_source '{label_source}' was observed by a site: provenance is '{OBSERVED}'"
        )
    if status == "ok" and not has_label:
        raise DatasetError("status is 'ok', but the row holds no label")


MEASUREMENT_FIELDS: Final = tuple(f.name for f in fields(Measurement) if f.name != "job")


def architecture_key(job: TrainingJob) -> str:
    """16 hexadecimal digits that are equal for jobs of the same network, whatever their batch,
    options or input size.

    They hash the family and the ordered ``(kind, parameters)`` of the layers; without layers, the
    totals.
    """
    return next(architecture_keys(JobTable.from_jobs([job])))


def architecture_keys(jobs: JobTable) -> Iterator[str]:
    """The :func:`architecture_key` of each job."""
    families = np.array(jobs.options("family"))[jobs.option_codes].tolist()
    kinds = np.array(jobs.kind_names)[jobs.layer_kinds].tolist()
    layers = list(zip(kinds, map(int, jobs.layer_parameters.tolist()), strict=True))
    totals = zip(*(map(int, jobs.column(name).tolist()) for name in TOTAL_FIELDS), strict=True)
    for family, own, total in zip(families, jobs.split_by_job(layers), totals, strict=True):
        text = json.dumps([family, own or total], separators=(",", ":"))
        yield hashlib.sha256(text.encode()).hexdigest()[:16]


def job_texts(jobs: JobTable) -> Iterator[str]:
    """A text for each job, equal for equal jobs."""
    layers = jobs.split_by_job(jobs.flat_layers())
    for numbers, code, own in zip(jobs.numbers.T.tolist(), jobs.option_codes, layers, strict=True):
        yield repr((numbers, jobs.option_sets[code], own))


def measurement_to_dict(measurement: Measurement) -> Document:
    """A flat JSON-ready object: the job's fields under their own names, then the measurement's."""
    document = job_to_dict(measurement.job)
    document |= {name: getattr(measurement, name) for name in MEASUREMENT_FIELDS}
    document["phases"] = [asdict(phase) for phase in measurement.phases]
    return document | {name: dict(getattr(measurement, name)) for name in ("allocator", "traced")}


def measurement_from_dict(document: Mapping[str, Any]) -> Measurement:
    """The inverse of :func:`measurement_to_dict`.

    Raises:
        DatasetError: on unknown, missing or impossible values.
        InvalidJobError: when the job's fields make no job.
    """
    values = {name: value for name, value in document.items() if name in MEASUREMENT_FIELDS}
    job = job_from_dict({name: value for name, value in document.items() if name not in values})
    try:
        return measurement_of(job, values)
    except TypeError as error:
        raise DatasetError(f"no measurement: {error}") from None


def measurement_of(job: TrainingJob, values: Mapping[str, Any]) -> Measurement:
    """The measurement of ``job`` with these values of its other fields, as JSON or Arrow has them."""
    phases = tuple(Phase(**phase) for phase in values.get("phases") or ())
    maps = {name: dict(values.get(name) or ()) for name in ("allocator", "traced")}
    return Measurement(job=job, **{**values, "phases": phases, **maps})


SOFTWARE: Final = ("gpu", "driver", "cuda", "cudnn", "torch", "allocator_settings", "protocol")
"""Fields that are equal for runs on the same GPU model and software."""
IDENTITY: Final = ("architecture", "options", *SOFTWARE)
"""Fields that are equal, as their jobs are, for runs of the same network, job and options there."""


def identity(measurement: Measurement) -> tuple[object, ...]:
    """The job and :data:`IDENTITY` of a measurement."""
    return (measurement.job, *(getattr(measurement, name) for name in IDENTITY))


assert not set(JOB_FIELDS) & set(MEASUREMENT_FIELDS)
