"""What a trace answers: expected and safe bytes in ``nvidia-smi`` terms, what they are made of, and where the peak is.

The parts add up: parameters, buffers, gradients, optimizer state, saved activations, inputs, temporaries, communication,
workspaces, fragmentation, context and communicator are the expected bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from gpumemnet.tracing.replay import Peak

TOP_MODULES: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPoint:
    """The memory at one batch size.

    Attributes:
        batch_size: samples per step.
        expected_bytes, safe_bytes: as in :class:`TraceAnswer`.
        fits: whether ``safe_bytes`` fit the GPU.
        traced: whether this batch size was traced, or foretold from two others.
    """

    batch_size: int
    expected_bytes: int
    safe_bytes: int
    fits: bool
    traced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFit:
    """Whether the job fits a GPU.

    Attributes:
        gpu: its name.
        capacity_bytes: its memory.
        expected_bytes, safe_bytes: the job's memory there, with that GPU's context and kernels.
        fits: whether ``safe_bytes`` fit.
    """

    gpu: str
    capacity_bytes: int
    expected_bytes: int
    safe_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The memory over one steady training step, for pictures.

    Attributes:
        classes: names of the rows of ``bytes_by_class``.
        bytes_by_class: requested bytes after each event of the step, one list per class.
        reserved_bytes: reserved bytes after each event.
        phases: ``(name, index of its first event in the curve)``.
    """

    classes: tuple[str, ...]
    bytes_by_class: tuple[tuple[int, ...], ...]
    reserved_bytes: tuple[int, ...]
    phases: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceAnswer:
    """The memory of one job on one GPU, or on one of those that it runs on.

    Attributes:
        model: what was traced, in words.
        gpu: name of the GPU that the amounts are for.
        capacity_bytes: its memory.
        batch_size: samples per step; on several GPUs, of each.
        expected_bytes: reserved bytes, CUDA context and NCCL's buffers, as ``nvidia-smi`` shows them.
        safe_bytes: an upper bound.
        safe_basis: what the bound rests on, and whether a coverage was measured.
        parts: bytes by name; they add up to ``expected_bytes``.
        reserved_bytes, allocated_bytes, requested_bytes: maxima of the caching allocator.
        context_bytes, context_source: the CUDA context, and where the number comes from.
        smallest_bytes: the smallest memory in which the job still runs, cached blocks released when needed; context included.
        peak: where the allocated bytes reach their maximum, and the largest holders then.
        loss: the loss that was used.
        notes: what was settled by a rule.
        not_included: what a training process may use beside.
        batches: the memory at other batch sizes.
        max_batch_size: the largest batch that fits, if it was asked for; 0 when none does.
        gpus: on which GPUs the job fits, if it was asked for.
        curve: the memory over a step, if it was asked for.
        job: the training job as JSON object, with its traced peak.
        ranks: how many GPUs the job runs on; all amounts are of one of them.
    """

    model: str
    gpu: str
    capacity_bytes: int
    batch_size: int
    expected_bytes: int
    safe_bytes: int
    safe_basis: str
    parts: dict[str, int]
    reserved_bytes: int
    allocated_bytes: int
    requested_bytes: int
    context_bytes: int
    context_source: str
    smallest_bytes: int
    peak: Peak
    loss: str
    notes: tuple[str, ...] = ()
    not_included: tuple[str, ...] = ()
    batches: tuple[BatchPoint, ...] = ()
    max_batch_size: int | None = None
    gpus: tuple[GpuFit, ...] = ()
    curve: Curve | None = None
    job: dict[str, Any] | None = None
    ranks: int = 1

    @property
    def fits(self) -> bool:
        """Whether the safe bytes fit the GPU."""
        return self.safe_bytes <= self.capacity_bytes


def answer_to_dict(answer: TraceAnswer) -> dict[str, Any]:
    """The answer as a JSON object."""
    return asdict(answer)


def answer_from_dict(document: Mapping[str, Any]) -> TraceAnswer:
    """The answer of such an object."""
    values = dict(document)
    peak = values.pop("peak")
    curve = values.pop("curve")
    return TraceAnswer(
        **{
            **values,
            "peak": Peak(**{**peak, "modules": tuple((name, size) for name, size in peak["modules"])}),
            "notes": tuple(values["notes"]),
            "not_included": tuple(values["not_included"]),
            "batches": tuple(BatchPoint(**point) for point in values["batches"]),
            "gpus": tuple(GpuFit(**fit) for fit in values["gpus"]),
            "curve": None
            if curve is None
            else Curve(
                classes=tuple(curve["classes"]),
                bytes_by_class=tuple(tuple(row) for row in curve["bytes_by_class"]),
                reserved_bytes=tuple(curve["reserved_bytes"]),
                phases=tuple((name, start) for name, start in curve["phases"]),
            ),
        }
    )
