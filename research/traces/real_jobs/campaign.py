"""Traces sampled jobs of real architectures, several batch sizes from each trace, and writes every
row as it is made.

Rows of one trace differ in nothing but the batch size, and those of one architecture share its
layers: they are not independent. A trace is made at a prime batch size
(:mod:`gpumemnet.tracing.model_tracer`); a row at another batch size has what
:func:`gpumemnet.trace` finds there.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from dataset_builder.measure.journal import Journal
from gpumemnet.errors import DatasetError, ExtractError, GpumemnetError
from gpumemnet.extract import ExtractOptions, extract_job
from gpumemnet.extract.checkpointing import blocks
from gpumemnet.extract.module_calls import inputs_from_example
from gpumemnet.gpu import DeviceProfile, context, device_profile
from gpumemnet.job.measurement import TRACED, Measurement
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.tracing.timeline import STEADY_STEPS, Timeline, live_at, steady_memory
from gpumemnet.units import GIB
from research.traces.kept_runs import traced_parts

from ..batch_scaling import ScalableRun, prime_for, scalable_run
from ..labels import PROTOCOL
from .architectures import draw_architecture
from .networks import Document, build, family_of, head_of, sample
from .options import RealOptions, draw_options

RECIPE: Final = "real"
SAMPLES: Final = 8
"""Batch size at which layers are extracted; they are counted per sample."""
_CARD_BYTES: Final = 80 * GIB
"""Batch sizes go up to what a card of this memory holds, on larger ones too."""
_LARGEST_BATCH: Final = 4_096
_LARGEST_TABLE_BATCH: Final = 65_536
_LARGE_MODULES: Final = 260
"""Networks with more modules are traced in one way only: a trace of them takes as long as many of
smaller ones."""
_LAST: Final = ".end"
_LEFT_OUT: Final = "left_out.jsonl"


@dataclass(frozen=True, slots=True)
class Plan:
    """One trace: how an architecture is trained, and where in the range of batch sizes its rows
    lie.

    Attributes:
        key: unique within a campaign; it begins with the seed.
        options: how it is trained.
        shares: places of the batch sizes between the smallest and the largest, in logarithms, from
            0 to 1.
    """

    key: str
    options: RealOptions
    shares: tuple[float, ...]


@dataclass(slots=True)
class Progress:
    """What a campaign has done: traces, rows by status, and traces that cannot be made or were left
    out."""

    traced: int = 0
    rows: Counter[str] = field(default_factory=Counter)
    left_out: int = 0


def planned(
    seed: int, architecture: int, options_each: int, rows_each: int
) -> tuple[dict[str, Any], list[Plan]]:
    """The architecture with this number, and its traces; the same for the same arguments.

    Args:
        seed: of the campaign.
        architecture: number, from 0; each has its own random generator, so a longer campaign begins
            as a shorter one.
        options_each: ways in which it is trained.
        rows_each: batch sizes of each.
    """
    draw = np.random.default_rng((seed, architecture))
    document = draw_architecture(draw)
    plans = []
    for number in range(options_each):
        options = draw_options(
            draw, "image_size" in document, document.get("settings", {}).get("use_cache", False)
        )
        shares = tuple(np.sort(draw.random(rows_each)).tolist())
        plans.append(Plan(f"{seed}.{architecture}.{number}", options, shares))
    return document, plans


def trace_real_jobs(
    folder: Path,
    architectures: int,
    options_each: int,
    rows_each: int,
    seed: int,
    seconds: float | None,
    tell: Callable[[str], None],
) -> Progress:
    """Trace the jobs that ``folder`` lacks; a later call continues where this one stopped.

    Args:
        folder: where the rows are written, and beside them what was left out, with the reason.
        architectures, options_each, rows_each, seed: as in :func:`planned`.
        seconds: after which no further trace begins; ``None`` for no limit.
        tell: called with one line for each trace.

    Raises:
        DatasetError: the folder cannot be written, another campaign runs in it, or timm is missing
            or of another version.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    progress = Progress()
    with Journal(folder) as journal:
        done = {
            key.rpartition(".")[0] for key in journal.finished if key.endswith(_LAST)
        } | _keys_left_out(folder)
        for number in range(architectures):
            document, plans = planned(seed, number, options_each, rows_each)
            subject: Subject | None = None
            for plan in plans:
                if plan.key in done:
                    continue
                if time.monotonic() > end:
                    return progress
                try:
                    subject = subject or Subject(document, build(document))
                    if subject.is_large and plan is not plans[0]:
                        raise ExtractError(
                            f"left out: a network of more than {_LARGE_MODULES} modules is traced in one way only"
                        )
                    rows = list(trace_plan(subject, plan))
                except DatasetError:
                    raise
                except Exception as error:  # an architecture that the installed libraries cannot build, or the trace cannot run
                    _note_left_out(folder, document, plan, error)
                    progress.left_out += 1
                    tell(f"{plan.key} {document['model']}: {error}"[:160])
                else:
                    progress.rows.update(_kept(journal, plan, rows))
                    progress.traced += 1
                    tell(f"{plan.key} {document['model']}: {len(rows)} rows")
    return progress


def _kept(journal: Journal, plan: Plan, rows: Sequence[Measurement]) -> Iterator[str]:
    """Write the rows of a trace that are not in the journal yet, and yield the status of each; the
    last key says that all are."""
    for number, row in enumerate(rows):
        key = f"{plan.key}{_LAST}" if number == len(rows) - 1 else f"{plan.key}.{number}"
        if key not in journal.finished:
            journal.append(key, row)
            yield row.status


@dataclass(slots=True, eq=False)
class Subject:
    """An architecture that is built once and traced in several ways.

    Attributes:
        document: the architecture.
        network: on meta tensors; which of its parameters train is set by each trace.
        extracted: what is frozen, and precision and compute capability, which decide the attention
            kernel → the extracted job.
    """

    document: Document
    network: nn.Module
    extracted: dict[tuple[str, str, tuple[int, int]], TrainingJob] = field(default_factory=dict)

    @property
    def is_large(self) -> bool:
        """Whether a trace takes so long that one must do."""
        return sum(1 for _ in self.network.modules()) > _LARGE_MODULES

    def job(self, options: TraceOptions, device: DeviceProfile, frozen: str) -> TrainingJob:
        """The job as ``extract`` writes it at a batch of :data:`SAMPLES`.

        Raises:
            ExtractError: the network does not run on its inputs.
        """
        freeze(self.network, frozen)
        key = (frozen, options.precision, device.compute_capability)
        found = next(
            (
                job
                for (known, *_), job in self.extracted.items()
                if known == frozen and job.attention_kernel is None
            ),
            None,
        )
        if found is None and key not in self.extracted:
            stated = ExtractOptions(gpu=device.name, **options.job_fields())
            self.extracted[key] = extract_job(
                self.network, sample(self.document, SAMPLES), stated
            ).job
        job = found or self.extracted[key]
        fields = options.job_fields() | {"attention_kernel": job.attention_kernel}
        # What the traced loop does (gpumemnet.tracing.training_loop).
        return replace(job, batches_on_gpu=1, outputs_freed="after_step", **fields)


def trace_plan(subject: Subject, plan: Plan) -> Iterator[Measurement]:
    """The rows of one trace, with rising batch sizes.

    Raises:
        ExtractError: the network cannot be extracted or traced.
    """
    network, document = subject.network, subject.document
    device, options = device_profile(plan.options.gpu), _trace_options(network, plan.options)
    job = subject.job(options, device, plan.options.frozen)
    platform = Platform.of(device, options)
    run = _recorded(network, document, options, platform)
    for batch_size in _batch_sizes(run, document, device, plan.shares):
        timeline, largest = run.at(batch_size, platform)
        yield _row(
            replace(job, batch_size=batch_size),
            document,
            plan,
            device,
            traced_parts(timeline, largest, device),
        )


def freeze(network: nn.Module, frozen: str) -> None:
    """Set which parameters of ``network`` train, by one of
    :data:`~research.traces.real_jobs.options.FROZEN`."""
    parameters = list(network.parameters())
    trained = {
        "none": parameters,
        "backbone": head_of(network),
        "half": parameters[len(parameters) // 2 :],
    }[frozen]
    chosen = set(map(id, trained))
    for parameter in parameters:
        parameter.requires_grad_(id(parameter) in chosen)


def _trace_options(network: nn.Module, options: RealOptions) -> TraceOptions:
    """The options of the trace; a network without a stack of blocks is not checkpointed."""
    fields = options.training.job_fields()
    if options.training.checkpointing != "none" and not blocks(network):
        fields["checkpointing"] = "none"
    return TraceOptions(**fields, keeps_names=False)


def _recorded(
    network: nn.Module, document: Document, options: TraceOptions, platform: Platform
) -> ScalableRun:
    one = inputs_from_example(sample(document, 1), None)
    tensors = [*network.parameters(), *network.buffers(), *one.tensors]
    prime = prime_for(dimension for tensor in tensors for dimension in tensor.shape)
    inputs = inputs_from_example(sample(document, prime), None)
    return scalable_run(network, inputs, options, platform)


def _batch_sizes(
    run: ScalableRun, document: Document, device: DeviceProfile, shares: tuple[float, ...]
) -> list[int]:
    """Batch sizes between 2 and what fits, in logarithms; every other one is a power of two, as
    people choose them."""
    room = min(device.capacity_bytes, _CARD_BYTES) - context(device).expected_bytes
    constant, per_sample = _peak_bytes(run.timeline, run.batch_size, device)
    most = _LARGEST_TABLE_BATCH if document["model"] == "recommender" else _LARGEST_BATCH
    largest = min(max((room - constant) / max(per_sample, 1.0), 2.0), most)
    sizes = set()
    for place, share in enumerate(shares):
        exponent = 1.0 + share * (math.log2(largest) - 1.0)
        sizes.add(2 ** int(exponent) if place % 2 else max(2, round(2**exponent)))
    return sorted(sizes)


def _peak_bytes(timeline: Timeline, batch_size: int, device: DeviceProfile) -> tuple[int, float]:
    """Bytes at the peak that do not depend on the batch, and bytes of each sample.

    Args:
        timeline: a run at the prime ``batch_size``, which divides the sizes of what holds the batch
            and no others.
        batch_size: the prime.
        device: the GPU.
    """
    constant = scaling = 0
    for index in live_at(timeline, steady_memory(timeline, device).replayed.peak.event):
        size = timeline.storages[index].size_bytes
        constant, scaling = (
            (constant, scaling + size) if size % batch_size == 0 else (constant + size, scaling)
        )
    return constant, scaling / batch_size


def _row(
    job: TrainingJob, document: Document, plan: Plan, device: DeviceProfile, parts: dict[str, int]
) -> Measurement:
    reserved, context_bytes = parts["steady_reserved_bytes"], context(device).expected_bytes
    peak_reserved = parts["startup_peak_reserved_bytes"]
    fits = peak_reserved + context_bytes <= device.capacity_bytes
    return Measurement(
        job=job,
        status="ok" if fits else "oom",
        reason=None if fits else "the trace needs more than the card has",
        label_source=TRACED,
        label_state="steady" if fits else None,
        capacity_bytes=device.capacity_bytes,
        provenance=TRACED,
        gpu=device.name,
        recipe=RECIPE,
        architecture=json.dumps(document, sort_keys=True),
        architecture_family=family_of(document),
        options=json.dumps({"frozen": plan.options.frozen, "trace": plan.key}, sort_keys=True),
        steady_process_bytes=reserved + context_bytes if fits else None,
        startup_peak_bytes=peak_reserved + context_bytes if fits else None,
        peak_reserved_bytes=peak_reserved if fits else None,
        traced=parts,
        traced_version=PROTOCOL,
        context_bytes=context_bytes,
        steps=STEADY_STEPS,
        seed=int(plan.key.partition(".")[0]),
        protocol=PROTOCOL,
        torch=torch.__version__,
    )


def _keys_left_out(folder: Path) -> set[str]:
    path = folder / _LEFT_OUT
    return (
        {json.loads(line)["trace"] for line in path.read_text().splitlines()}
        if path.exists()
        else set()
    )


def _note_left_out(folder: Path, document: Document, plan: Plan, error: Exception) -> None:
    name = "" if isinstance(error, GpumemnetError) else f"{type(error).__name__}: "
    entry = {
        "trace": plan.key,
        "reason": f"{name}{error}"[:500],
        "architecture": dict(document),
        "options": plan.options.to_dict(),
    }
    with (folder / _LEFT_OUT).open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry, sort_keys=True) + "\n")
