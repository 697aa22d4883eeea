"""The result of a trace: expected and safe bytes as ``nvidia-smi`` shows them, their parts, and the
peak.

The parts add up to the expected bytes: parameters, buffers, gradients, optimizer state, saved
activations, inputs, temporaries, communication, workspaces, fragmentation, context and
communicator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from gpumemnet.atomic_files import (
    Document,
    from_json,
)
from gpumemnet.gpu import NO, UNKNOWN, YES, verdict
from gpumemnet.launchers.pipeline_stages import RankPeak
from gpumemnet.units import GIB, MIB, ceil_mib

PART_NAMES: Final[Mapping[str, str]] = {
    "parameter": "parameters",
    "buffer": "buffers",  # running statistics and tables
    "gradient": "gradients",  # of the trainable parameters
    "optimizer_state": "optimizer state",  # what the optimizer keeps for each parameter
    "saved_activation": "saved activations",  # what the forward pass keeps for the backward pass
    "input": "inputs",  # the batch and its targets
    "temporary": "temporaries",  # what operators need at the peak
    "communication": "communication",  # gathered parameters, and buffers for exchange with GPUs
    "workspace": "workspaces",  # scratch memory of cuBLAS, cuDNN and kernels
    "fragmentation": "fragmentation",  # rounding, and cached blocks that no request fits into
    "context": "CUDA context",  # driver, libraries and loaded kernels
    "communicator": "NCCL",  # its own buffers, from published readings
}
"""Part of :attr:`gpumemnet.tracing.result.TraceAnswer.parts` → its name."""

TOP_MODULES: Final = 10
"""How many of the modules that hold most at the peak a report names."""


def shown_mib(amounts: Sequence[int]) -> list[int]:
    """Round ``amounts`` in bytes to whole MiB that add up to the rounded-up total: the largest
    remainders are rounded up."""
    floors = [amount // MIB for amount in amounts]
    order = sorted(range(len(amounts)), key=lambda index: -(amounts[index] % MIB))
    for index in order[: ceil_mib(sum(amounts)) - sum(floors)]:
        floors[index] += 1
    return floors


@dataclass(frozen=True)
class Peak:
    """The moment at which the allocated bytes reach their maximum.

    Attributes:
        event: index of the event.
        phase: ``build``, ``forward``, ``backward`` or ``optimizer``.
        step: optimizer step, from 1.
        operator: the operator that allocated the memory.
        module: dotted path of the module that it belongs to.
        modules: ``(module, bytes)``, largest first.
    """

    event: int
    phase: str
    step: int
    operator: str
    module: str
    modules: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class PhasePeak:
    """The most that tensors take in a kind of phase.

    Attributes:
        name: ``build``, ``forward``, ``backward``, ``optimizer`` or ``evaluation``, of which step.
        step: the optimizer step of the peak.
        requested_bytes: bytes of all tensors on the GPU.
    """

    name: str
    step: int
    requested_bytes: int


@dataclass(frozen=True, kw_only=True)
class BatchPoint:
    """The memory at one batch size.

    Attributes:
        batch_size: samples per step.
        expected_bytes, safe_bytes: as in :class:`TraceAnswer`.
        verdict: whether it fits the GPU, one of those of :data:`~gpumemnet.gpu.VERDICT_TEXTS`.
    """

    batch_size: int
    expected_bytes: int
    safe_bytes: int
    verdict: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The memory over one training step in steady state, for charts.

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


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """The host memory of a script's processes, without Python, libraries and the driver.

    Attributes:
        tensor_bytes: the most that the tensors of a process take on the host, weights before they
            move included.
        pinned_bytes: the most that is pinned, in blocks of a power of two.
        waiting_bytes: batches that the workers of a data loader have ready, in shared memory.
        node_ranks: processes that train on a host.
        available_bytes: memory of a host, where it is given.
    """

    tensor_bytes: int
    pinned_bytes: int
    waiting_bytes: int
    node_ranks: int
    available_bytes: int | None = None

    @property
    def fits(self) -> bool | None:
        """Whether a host has as much; ``None`` where its memory is not given."""
        return None if self.available_bytes is None else self.node_bytes <= self.available_bytes

    @property
    def node_bytes(self) -> int:
        """The most that all processes of a host take, if each takes what the first does."""
        return (self.tensor_bytes + self.waiting_bytes) * self.node_ranks


@dataclass(frozen=True, kw_only=True, repr=False)
class TraceAnswer:
    """The memory of one job on one GPU, or on one of several GPUs that it runs on.

    Attributes:
        model: name of the traced model.
        gpu: name of the GPU that the amounts are for.
        available_bytes: memory that a process can use on the GPU: its capacity without what the
            driver reserves.
        batch_size: samples per step; on several GPUs, samples per step and GPU.
        expected_bytes: reserved bytes, CUDA context and NCCL's buffers in steady state, as
            ``nvidia-smi`` shows them.
        safe_bytes: an upper bound on the steady state and on what the start-up cannot do without.
        startup_peak_bytes: the same as ``expected_bytes`` at the moment of most memory, start-up
            included.  It is larger if the program empties the cache before it trains, or if cuDNN
            searches for algorithms in the first step, which takes memory that is free and gives it
            back.  ``None`` where the workspaces that a search tries are computed by rules: only
            cuDNN itself knows the largest.
        safe_basis: how the bound is computed, and whether its coverage was measured.
        parts: bytes by name; they add up to ``expected_bytes``.
        reserved_bytes, allocated_bytes, requested_bytes: maxima of the caching allocator.
        context_bytes, context_source: the CUDA context, and the source of the number.
        smallest_bytes: the smallest memory in which the job still runs, context included; cached
            blocks are released on demand, and convolutions do without workspaces.
        peak: the moment of most allocated bytes, and the modules that hold most of them.
        loss: the loss that was used.
        notes: assumptions that the trace made.
        not_included: further memory that a training process may use.
        batches: the memory at other batch sizes, on request.
        max_batch_size: the largest batch size that fits, on request; 0 if none does.
        curve: the memory over one training step, on request.
        job: the training job as a JSON object, with its traced peak, on request.
        ranks: number of GPUs that the job runs on; all amounts are for one of them.
        by_rank: ranks that differ, the largest first; the answer is for that one.
        convolution_workspaces: where the workspaces of convolutions come from, ``rules`` or a
            version of cuDNN; ``None`` without convolutions.
        branches: lines of a script that branch on values of the GPU; both ways were traced, and
            this is the larger answer.
        selections: lines of a script that select elements by values of the GPU; half of them are
            expected, and all are safe.
        phases: the most that tensors take in each kind of phase of the run.
        is_lower_bound: whether the deadline was reached before the script had trained for enough
            steps: the amounts are then what it had taken until there, and training takes more.
        error: what ended a script after its first steps, or a statement of it, and perhaps only in
            the trace; what follows in it is not in the answer. Empty if nothing did, and where the
            script had trained for as long as is wanted: its loops and loaders end early then.
        host: host memory of a script; ``None`` for a model.
    """

    model: str
    gpu: str
    available_bytes: int
    batch_size: int
    expected_bytes: int
    safe_bytes: int
    startup_peak_bytes: int | None
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
    curve: Curve | None = None
    job: Document | None = None
    ranks: int = 1
    by_rank: tuple[RankPeak, ...] = ()
    convolution_workspaces: str | None = None
    branches: tuple[str, ...] = ()
    selections: tuple[str, ...] = ()
    phases: tuple[PhasePeak, ...] = ()
    is_lower_bound: bool = False
    error: str = ""
    host: HostMemory | None = None

    @property
    def verdict(self) -> str:
        """Whether the job fits the GPU, one of those of :data:`~gpumemnet.gpu.VERDICT_TEXTS`; a lower bound has
        no upper one."""
        available_mib, least_mib = self.available_bytes // MIB, ceil_mib(self.expected_bytes)
        if self.is_lower_bound:
            return NO if least_mib > available_mib else UNKNOWN
        return verdict(least_mib, ceil_mib(self.safe_bytes), available_mib)

    @property
    def amounts(self) -> tuple[tuple[str, int], ...]:
        """What is known of the memory: the expected and the safe bytes, or a lower bound."""
        if self.is_lower_bound:
            return (("at least", self.expected_bytes),)
        return ("expected", self.expected_bytes), ("safe", self.safe_bytes)

    @property
    def fits(self) -> bool:
        """Whether the safe bytes are available on the GPU."""
        return self.verdict == YES

    def __repr__(self) -> str:
        amounts = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in self.amounts)
        return f"<TraceAnswer: {self.model}, batch size {self.batch_size}: {amounts} on {self.gpu}>"


def answer_to_dict(answer: TraceAnswer) -> Document:
    """Return the answer as a JSON object, with its verdict."""
    document = asdict(answer) | {"verdict": answer.verdict}
    if answer.host is not None:
        document["host"] |= {"node_bytes": answer.host.node_bytes, "fits": answer.host.fits}
    return document


def answer_from_dict(document: Mapping[str, Any]) -> TraceAnswer:
    """Return the answer of a JSON object from :func:`answer_to_dict`."""
    return from_json(TraceAnswer, document)
