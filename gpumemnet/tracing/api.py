"""``gpumemnet.trace`` for a model object, :func:`trace_file` for a file that builds one, and what
they are told besides the model: options, GPU, allocator and extra results, checked, and as JSON for
a child process.

Files run in a child process, so that user code cannot affect the caller.  This module loads no
torch; the first call does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from gpumemnet.allocator.settings import AllocatorSettings
from gpumemnet.atomic_files import (
    Document,
    from_json,
)
from gpumemnet.cudnn.session import AUTO, OFF, find_library
from gpumemnet.errors import InvalidRequestError, check_installed
from gpumemnet.extract.extraction import DEFAULT_GPU
from gpumemnet.extract.factory import build, check_batch_size, source_code
from gpumemnet.gpu import DeviceProfile, asked_profile, find_profile
from gpumemnet.job.layers import check_choice
from gpumemnet.job.training_job import TrainingOptions
from gpumemnet.physics.element_types import SCALED_PRECISIONS
from gpumemnet.sandbox.process import ask
from gpumemnet.tracing.result import TraceAnswer, answer_from_dict, answer_to_dict

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from gpumemnet.extract.module_calls import ModelInputs
    from gpumemnet.tracing.missing_values import GuessedValues

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


@dataclass(frozen=True, kw_only=True)
class ExtraResults:
    """Results that a trace computes on request.

    Attributes:
        batches: batch sizes at which to compute the memory too.
        max_batch: whether to find the largest batch size that fits the GPU.
        curve: whether to return the memory over one training step.
        job: whether to return the training job with its traced peak.
    """

    batches: tuple[int, ...] = ()
    max_batch: bool = False
    curve: bool = False
    job: bool = False


@dataclass(frozen=True, kw_only=True)
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
        keeps_names: whether batch, output and loss of a step stay alive until the next step
            replaces them, as in a loop that calls no function for each step.
        last_batch_size: samples in the last batch of an epoch, if it is smaller.  Two further steps
            run, one of that size and one of the full size, because the allocator's cache then holds
            blocks for both.
        forward_passes_first: forward passes in training mode before the optimizer exists, such as
            those of a model summary.
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
    keeps_names: bool = True
    last_batch_size: int | None = None
    forward_passes_first: int = 0
    clip_norm: float | None = None
    tf32: bool = True

    def __post_init__(self) -> None:
        TrainingOptions.__post_init__(self)
        for name, choices in (("loss", LOSSES), ("zero_grad", ZERO_GRAD), ("parallel", PARALLEL)):
            value = getattr(self, name)
            if name != "loss" or isinstance(value, str):
                check_choice(value, choices, name)
        check_batch_size(self.last_batch_size, "last_batch_size")


DEFAULT_OPTIONS: Final = TraceOptions()


@dataclass(frozen=True, kw_only=True)
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
    cudnn: str = OFF,
) -> TraceRequest:
    """Return the request, with the GPU looked up and the options checked against each other.

    Args:
        options: how the model is trained.
        gpu: name or alias of a GPU in the catalogue, path of a profile's ``.json`` file, or a
            profile.
        allocator: settings of the caching allocator; PyTorch's defaults by default.
        extras: further results to compute.
        cudnn: ``off``, ``auto`` or the path of a cuDNN library.

    Raises:
        InvalidJobError: a batch size of ``extras`` is out of range.
        InvalidRequestError: options exclude each other, or there is no such GPU or cuDNN.
    """
    extras = extras or ExtraResults()
    _check_parallel(options, extras.job)
    for size in extras.batches:
        check_batch_size(size, "batches")
    library = cudnn if cudnn in (AUTO, OFF) else str(find_library(cudnn))
    settings = allocator or AllocatorSettings()
    return TraceRequest(
        options=options, gpu=find_profile(gpu), allocator=settings, extras=extras, cudnn=library
    )


def request_from_dict(document: Mapping[str, Any]) -> TraceRequest:
    """Return the request that :func:`dataclasses.asdict` turned into a JSON object."""
    return from_json(TraceRequest, document)


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


def trace(
    model: nn.Module,
    inputs: object,
    *,
    optimizer: str | Optimizer | Callable[..., Optimizer] = "adamw",
    batch_size: int | None = None,
    gpu: str | DeviceProfile = DEFAULT_GPU,
    context_mib: int | None = None,
    allocator: AllocatorSettings | None = None,
    cudnn: str = OFF,
    extras: ExtraResults | None = None,
    **options: Any,
) -> TraceAnswer:
    """Predict the GPU memory that training ``model`` takes, without a GPU.

    Two training steps run on meta tensors, which have shapes and no values.  Every allocation goes
    through a simulation of PyTorch's caching allocator.  The model is left as it was.

    Args:
        model: the model, on any device, meta included; its weights are neither read nor copied.
        inputs: what the model is called with: a tensor, a tuple or list of arguments, or a dict of
            keyword arguments, each ``[batch, …]``.  Only shapes and dtypes matter, and the values
            of small tensors of whole numbers, such as masks.
        optimizer: a name of :data:`~gpumemnet.job.training_job.OPTIMIZERS`, an optimizer over
            the model's parameters, or a function from parameters to an optimizer, such as
            ``lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)``.
        batch_size: samples per step; the batch size of ``inputs`` by default.
        gpu: name or alias of a GPU in the catalogue, path of a profile's ``.json`` file, or a
            profile.
        context_mib: CUDA context of the process in MiB; the GPU's usual one by default.
        allocator: settings of the caching allocator; PyTorch's defaults by default.
        cudnn: where the workspaces of convolutions come from: ``off`` for rules; ``auto`` for
            cuDNN's own plans if cuDNN 9.8 or later is installed, else rules; or the path of the
            cuDNN that the job will run with.
        extras: further results to compute, such as the largest batch size.
        options: further fields of :class:`TraceOptions`, with their defaults: ``precision``,
            ``loss``, ``optimizer_implementation``, ``checkpointing``, ``channels_last``,
            ``gradient_accumulation``, ``zero_grad``, ``attention_kernel``, ``cudnn_benchmark``,
            ``parallel`` and ``ranks`` (the answer is for one of them, with a batch of
            ``batch_size``), ``clip_norm``, ``tf32``, ``keeps_names`` and ``last_batch_size``.

    Returns:
        the answer; all amounts are in bytes, for one GPU.

    Raises:
        ExtractError: names the operator or the line of code that cannot be traced.
        InvalidJobError: an option of the job has no such value.
        InvalidRequestError: another option has no such value, or two options exclude each other.
        MissingExtraError: torch is not installed.
        UnsupportedTorchError: the installed PyTorch lacks what a trace needs.

    Example:
        >>> import gpumemnet, torch
        >>> model = torch.nn.Linear(1024, 1024)
        >>> answer = gpumemnet.trace(model, torch.empty(64, 1024), optimizer="adamw", gpu="A100")
        >>> answer.parts["parameter"]
        4198400
    """
    named = {"optimizer": optimizer} if isinstance(optimizer, str) else {"own_optimizer": optimizer}
    device = asked_profile(gpu, context_mib, "context_mib")
    stated = TraceOptions(**named, **options)
    request = checked_request(stated, device, allocator, extras, cudnn)
    return trace_request(model, inputs, request, batch_size)


def trace_request(
    model: nn.Module, inputs: object, request: TraceRequest, batch_size: int | None = None
) -> TraceAnswer:
    """Predict as :func:`trace` does, with everything but the model in one checked object.

    Args:
        model, inputs, batch_size: as in :func:`trace`.
        request: how the model is trained, on which GPU, and what else to compute.

    Raises:
        ExtractError, InvalidJobError, InvalidRequestError, MissingExtraError,
        UnsupportedTorchError: as in :func:`trace`.
    """
    notes = checked_torch()
    from gpumemnet.extract.module_calls import as_model_inputs
    from gpumemnet.tracing.model_tracer import ModelTracer

    return ModelTracer(model, as_model_inputs(inputs, batch_size), request, notes).answer()


def checked_torch() -> tuple[str, ...]:
    """Notes on the installed PyTorch, see :func:`~gpumemnet.torch_private.names.check_torch`."""
    check_installed("torch", "extract", PURPOSE)
    from gpumemnet.torch_private.names import check_torch

    return check_torch()


_LOG: Final = logging.getLogger("gpumemnet.tracing")
PURPOSE: Final = "tracing a model"
"""Of a child process, for error messages."""


def trace_file(
    factory: Document,
    request: TraceRequest,
    *,
    deadline_seconds: float = DEADLINE_SECONDS,
    **shown: Any,
) -> TraceAnswer:
    """Predict the memory of training the model that a file builds.

    Args:
        factory: from :func:`~gpumemnet.extract.factory.factory_request`.
        request: how the model is trained, in words, numbers and switches only; on which GPU, and
            what else to compute.
        deadline_seconds: time for everything, including the import of torch.
        **shown: ``show_output`` and ``progress`` of :func:`~gpumemnet.sandbox.process.asking`.

    Returns:
        the answer; all amounts are in bytes, for one GPU.

    Raises:
        ExtractError: names the operator or the line of code that cannot be traced.
        InvalidRequestError: options exclude each other.
        MissingExtraError: torch is not installed.
    """
    answer = ask(
        _trace_in_child,
        factory["source"],
        {**factory, **asdict(request)},
        purpose=PURPOSE,
        deadline_seconds=deadline_seconds,
        **shown,
    )
    return answer_from_dict(answer)


def _trace_in_child(document: Document) -> Document:
    request = request_from_dict(document)
    with factory_model(document, request.options) as (model, inputs, options, guesses):
        answer = trace_request(model, inputs, replace(request, options=options))
    return answer_to_dict(replace(answer, notes=(*guesses.notes, *answer.notes)))


@contextmanager
def factory_model(
    document: Mapping[str, Any], options: TraceOptions
) -> Iterator[tuple[nn.Module, ModelInputs, TraceOptions, GuessedValues]]:
    """Context of what a factory builds: the model, what it is called with, the options with its own
    loss, and the values that were guessed.

    Args:
        document: of :func:`gpumemnet.extract.factory.factory_request`.
        options: how the model is trained.
    """
    code = source_code(document)
    _LOG.info("importing torch")
    from gpumemnet.torch_private.training import without_dynamo
    from gpumemnet.tracing.missing_values import GuessedValues

    _LOG.info("building the model")
    guesses = GuessedValues()
    with without_dynamo():
        built, inputs = build(document, code, guesses)
        own = options if built.loss is None else replace(options, loss=built.loss)
        yield built.model, inputs, own, guesses
