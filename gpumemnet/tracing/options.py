"""What a trace is told besides the model: options, GPU, allocator and extra results, checked, and as
JSON for a child process; and the platform that follows from them.

This module loads no torch, so the command line and the parent of a child process use it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpumemnet.allocator.settings import AllocatorSettings
from gpumemnet.cudnn.session import AUTO, OFF, find_library
from gpumemnet.errors import InvalidRequestError
from gpumemnet.extract.extraction import DEFAULT_GPU
from gpumemnet.gpu import ContextReading, DeviceProfile, find_profile
from gpumemnet.job.layers import check_count, describe
from gpumemnet.job.training_job import MAX_BATCH_SIZE, MAX_RANKS, TrainingOptions
from gpumemnet.physics.element_types import SCALED_PRECISIONS

LOSSES: Final = ("auto", "cross_entropy", "mse", "bce", "mean")
"""Names of losses; ``auto`` takes the model's own loss, or one that fits its output."""
ZERO_GRAD: Final = ("before_forward", "before_backward", "after_step")
"""Where a training loop drops its gradients."""
PARALLEL: Final = ("none", "ddp", "fsdp", "fsdp_zero2")
"""How a job uses several GPUs.

``ddp`` holds a replica on each GPU.  ``fsdp`` and ``fsdp_zero2`` shard parameters, gradients and
optimizer state.  With ``fsdp`` (ZeRO-3) gathered parameters are freed after each block; with
``fsdp_zero2`` (ZeRO-2) they stay until the backward pass.
"""
DEADLINE_SECONDS: Final = 600.0
"""Time for a whole trace in a child process, including the import of torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraResults:
    """Results that a trace computes on request.

    Attributes:
        batches: batch sizes at which to compute the memory too.
        max_batch: whether to find the largest batch size that fits the GPU.
        gpus: whether to compute the memory on every GPU of the catalogue.
        curve: whether to return the memory over one training step.
        job: whether to return the training job with its traced peak.
    """

    batches: tuple[int, ...] = ()
    max_batch: bool = False
    gpus: bool = False
    curve: bool = False
    job: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions(TrainingOptions):
    """The training options, and how the training loop is written.

    ``ranks`` counts the GPUs for every value of ``parallel``, not only replicas.

    Attributes:
        own_optimizer: an optimizer over the model's parameters, or a function from parameters to
            one; it replaces ``optimizer``.
        loss: a name of :data:`LOSSES`, or a function of the model's output.
        zero_grad: where the loop drops its gradients, one of :data:`ZERO_GRAD`.
        parallel: how several GPUs are used, one of :data:`PARALLEL`; each GPU has the batch size of
            the inputs.
        best_effort: whether to continue with a guess where the model needs the values of tensors,
            see :class:`~gpumemnet.tracing.missing_values.GuessedValues`.
        keeps_names: whether batch, output and loss of a step stay alive until the next step
            replaces them, as in a loop that is not inside a function.
        last_batch_size: samples in the last batch of an epoch, if it is smaller.  Two further steps
            run, one of that size and one of the full size, because the allocator's cache then holds
            blocks for both.
        forward_passes_first: forward passes in training mode before the optimizer exists, such as
            those of a model summary.
        weight_decay: that of a named optimizer; PyTorch's default by default.  SGD copies the
            gradients to add it.
        nesterov: whether a named SGD with momentum uses Nesterov's.
        clip_norm: largest norm of the gradients (``torch.nn.utils.clip_grad_norm_``); they are not
            clipped by default.
        tf32: whether fp32 convolutions may run on TF32 tensor cores
            (``torch.backends.cudnn.allow_tf32``).

    Raises:
        InvalidJobError, InvalidRequestError: names the option and its values.
    """

    own_optimizer: object = None
    loss: object = LOSSES[0]
    zero_grad: str = ZERO_GRAD[0]
    parallel: str = PARALLEL[0]
    best_effort: bool = False
    keeps_names: bool = False
    last_batch_size: int | None = None
    forward_passes_first: int = 0
    weight_decay: float | None = None
    nesterov: bool = False
    clip_norm: float | None = None
    tf32: bool = True

    def __post_init__(self) -> None:
        TrainingOptions.__post_init__(self)
        for name, choices in (("loss", LOSSES), ("zero_grad", ZERO_GRAD), ("parallel", PARALLEL)):
            value = getattr(self, name)
            if (name != "loss" or isinstance(value, str)) and value not in choices:
                raise InvalidRequestError(
                    f"must be one of {', '.join(choices)}, not {describe(value)}", name
                )
        if self.own_optimizer is not None and self.optimizer_settings:
            name = next(iter(self.optimizer_settings))
            raise InvalidRequestError(
                "belongs to an optimizer given by its name; your own has its own", name
            )
        if self.last_batch_size is not None and (
            type(self.last_batch_size) is not int or self.last_batch_size < 1
        ):
            raise InvalidRequestError(
                f"must be at least 1, not {describe(self.last_batch_size)}", "last_batch_size"
            )
        for name in ("weight_decay", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise InvalidRequestError(f"must not be negative, but is {describe(value)}", name)

    @property
    def optimizer_settings(self) -> dict[str, Any]:
        """Arguments of a named optimizer that differ from its usual ones."""
        decay = {} if self.weight_decay is None else {"weight_decay": self.weight_decay}
        return decay | ({"nesterov": True} if self.nesterov else {})


DEFAULT_OPTIONS: Final = TraceOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """What a trace is told besides the model.

    Attributes:
        options: how the model is trained; its values are words, numbers or switches.
        gpu: the GPU.
        allocator: settings of the caching allocator.
        extras: further results to compute.
        cudnn: ``off``, ``auto`` or the path of a cuDNN library, see :func:`gpumemnet.trace`.
    """

    options: TraceOptions
    gpu: DeviceProfile
    allocator: AllocatorSettings
    extras: ExtraResults
    cudnn: str = OFF


def checked_request(
    options: TraceOptions,
    gpu: str | DeviceProfile = DEFAULT_GPU,
    allocator: AllocatorSettings | None = None,
    extras: ExtraResults | None = None,
    batch_size: int | None = None,
    cudnn: str = OFF,
) -> TraceRequest:
    """Return the request, with the GPU looked up and the options checked against each other.

    Args:
        options: how the model is trained.
        gpu: name or alias of a GPU in the catalogue, path of a profile's ``.json`` file, or a
            profile.
        allocator: settings of the caching allocator; PyTorch's defaults by default.
        extras: further results to compute.
        batch_size: batch size of the job, if it is known.
        cudnn: ``off``, ``auto`` or the path of a cuDNN library.

    Raises:
        InvalidJobError: the batch size is out of range.
        InvalidRequestError: options exclude each other, or there is no such GPU or cuDNN.
    """
    if batch_size is not None:
        check_count(batch_size, "batch_size", 1, MAX_BATCH_SIZE)
    extras = extras or ExtraResults()
    _check_parallel(options, extras.job)
    for size in extras.batches:
        if type(size) is not int or size < 1:
            raise InvalidRequestError(f"must be at least 1, not {describe(size)}", "batches")
    profile = find_profile(gpu) if isinstance(gpu, str) else gpu
    library = cudnn if cudnn in (AUTO, OFF) else str(find_library(cudnn))
    settings = allocator or AllocatorSettings()
    return TraceRequest(
        options=options, gpu=profile, allocator=settings, extras=extras, cudnn=library
    )


def request_from_dict(document: Mapping[str, Any]) -> TraceRequest:
    """Return the request that :func:`dataclasses.asdict` turned into a JSON object."""
    gpu, allocator, extras = document["gpu"], document["allocator"], document["extras"]
    profile = {
        **gpu,
        "aliases": tuple(gpu["aliases"]),
        "compute_capability": tuple(gpu["compute_capability"]),
        "context_readings": tuple(ContextReading(**reading) for reading in gpu["context_readings"]),
    }
    return TraceRequest(
        options=TraceOptions(**document["options"]),
        gpu=DeviceProfile(**profile),
        allocator=AllocatorSettings(
            **{
                **allocator,
                "roundup_power2_divisions": tuple(allocator["roundup_power2_divisions"]),
            }
        ),
        extras=ExtraResults(**{**extras, "batches": tuple(extras["batches"])}),
        cudnn=document["cudnn"],
    )


def _check_parallel(options: TraceOptions, with_job: bool) -> None:
    """Check that a job that uses several GPUs in this way can be traced.

    Args:
        options: how the model is trained.
        with_job: whether the trace returns the training job too.

    Raises:
        InvalidRequestError: names options that exclude each other.
    """
    parallel, ranks = options.parallel, options.ranks
    if parallel == "none":
        if ranks > 1:
            raise InvalidRequestError(
                f"{ranks:,} GPUs need a value of parallel: use {', '.join(PARALLEL[1:])}", "ranks"
            )
        return
    if ranks == 1:
        raise InvalidRequestError(f"{parallel} needs at least 2 GPUs; set ranks", "ranks")
    if options.precision in SCALED_PRECISIONS and parallel != "ddp":
        raise InvalidRequestError(
            f"{options.precision} is not supported with sharded parameters; use amp_bf16",
            "precision",
        )
    if with_job and parallel != "ddp":
        raise InvalidRequestError(
            "a training job can describe replicas (ddp), not shards; do not request the job",
            "parallel",
        )


def check_ranks(ranks: int) -> int:
    """Return ``ranks`` if it is in range.

    Raises:
        InvalidRequestError: names the range.
    """
    if type(ranks) is not int or not 1 <= ranks <= MAX_RANKS:
        raise InvalidRequestError(
            f"must be a number of GPUs from 1 to {MAX_RANKS:,}, not {describe(ranks)}", "ranks"
        )
    return ranks
