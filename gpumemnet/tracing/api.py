"""``gpumemnet.trace``: the memory of a model object, for other people's programs.

This module loads no torch; the first call does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumemnet.cudnn.session import OFF
from gpumemnet.errors import MissingExtraError
from gpumemnet.extract.options import DEFAULT_GPU
from gpumemnet.gpu.catalogue import asked_profile
from gpumemnet.tracing.options import ExtraResults, TraceOptions, TraceRequest, checked_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from gpumemnet.allocator import AllocatorSettings
    from gpumemnet.gpu.catalogue import DeviceProfile
    from gpumemnet.tracing.report.answer import TraceAnswer


def trace(
    model: nn.Module,
    inputs: object,
    *,
    loss: str | nn.Module | Callable[..., Tensor] = "auto",
    optimizer: str | Optimizer | Callable[..., Optimizer] = "adamw",
    precision: str = "fp32",
    batch_size: int | None = None,
    gpu: str | DeviceProfile = DEFAULT_GPU,
    optimizer_implementation: str = "default",
    checkpointing: str = "none",
    channels_last: bool = False,
    gradient_accumulation: int = 1,
    zero_grad: str = "before_forward",
    attention_kernel: str | None = None,
    cudnn_benchmark: bool = False,
    parallel: str = "none",
    ranks: int = 1,
    best_effort: bool = False,
    weight_decay: float | None = None,
    nesterov: bool = False,
    clip_norm: float | None = None,
    tf32: bool = True,
    keeps_names: bool = False,
    last_batch_size: int | None = None,
    context_mib: int | None = None,
    allocator: AllocatorSettings | None = None,
    cudnn: str = OFF,
    extras: ExtraResults | None = None,
) -> TraceAnswer:
    """Predict the GPU memory that training ``model`` takes, without a GPU.

    Two training steps run on meta tensors, which have shapes and no values.  Every allocation goes
    through a simulation of PyTorch's caching allocator.  The model is left as it was.

    Args:
        model: the model, on any device, meta included; its weights are neither read nor copied.
        inputs: what the model is called with: a tensor, a tuple or list of arguments, or a dict of
            keyword arguments, each ``[batch, …]``.  Only shapes and dtypes matter, and the values
            of small tensors of whole numbers, such as masks.
        loss: a name of :data:`~gpumemnet.tracing.options.LOSSES`, a loss of ``torch.nn``, or a
            function from the model's output to a scalar tensor.
        optimizer: a name of :data:`~gpumemnet.job.training_job.OPTIMIZERS`, an optimizer over
            the model's parameters, or a function from parameters to an optimizer.
        precision: one of :data:`~gpumemnet.job.training_job.PRECISIONS`.
        batch_size: samples per step; the batch size of ``inputs`` by default.
        gpu: name or alias of a GPU in the catalogue, path of a profile's ``.json`` file, or a
            profile.
        optimizer_implementation: one of
            :data:`~gpumemnet.job.training_job.OPTIMIZER_IMPLEMENTATIONS`.
        checkpointing: ``none``, or ``every_block`` to recompute each block in the backward pass.
        channels_last: whether model and images use the NHWC memory format.
        gradient_accumulation: forward and backward passes per optimizer step.
        zero_grad: where the training loop drops its gradients, one of
            :data:`~gpumemnet.tracing.options.ZERO_GRAD`.
        attention_kernel: one of :data:`~gpumemnet.job.training_job.ATTENTION_KERNELS`; the
            kernel that PyTorch would choose by default.
        cudnn_benchmark: whether ``torch.backends.cudnn.benchmark`` is on.
        parallel: how several GPUs are used, one of :data:`~gpumemnet.tracing.options.PARALLEL`; the
            answer is for one of them.
        ranks: number of GPUs; each has a batch of ``batch_size``.
        best_effort: whether to continue with a guess, and a note, where the model needs the values
            of tensors.
        weight_decay: that of an optimizer given by its name; PyTorch's default by default.
        nesterov: whether ``sgd_momentum`` uses Nesterov's momentum.
        clip_norm: largest norm of the gradients, as ``torch.nn.utils.clip_grad_norm_`` takes it;
            not clipped by default.
        tf32: whether fp32 convolutions may run on TF32 tensor cores
            (``torch.backends.cudnn.allow_tf32``).
        keeps_names: whether batch, output and loss of a step live until the next step replaces
            them, as in a loop outside of a function.
        last_batch_size: samples in the last batch of an epoch, where it is smaller.
        context_mib: CUDA context of the process in MiB; the GPU's usual one by default.
        allocator: settings of the caching allocator; PyTorch's defaults by default.
        cudnn: where the workspaces of convolutions come from: ``off`` for rules; ``auto`` for
            cuDNN's own plans if cuDNN 9.8 or later is installed, else rules; or the path of the
            cuDNN that the job will run with.
        extras: further results to compute, such as the largest batch size.

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
    options = TraceOptions(
        **named,
        precision=precision,
        optimizer_implementation=optimizer_implementation,
        checkpointing=checkpointing,
        channels_last=channels_last,
        gradient_accumulation=gradient_accumulation,
        zero_grad=zero_grad,
        attention_kernel=attention_kernel,
        cudnn_benchmark=cudnn_benchmark,
        loss=loss,
        parallel=parallel,
        ranks=ranks,
        best_effort=best_effort,
        weight_decay=weight_decay,
        nesterov=nesterov,
        clip_norm=clip_norm,
        tf32=tf32,
        keeps_names=keeps_names,
        last_batch_size=last_batch_size,
    )
    device = asked_profile(gpu, context_mib, "context_mib")
    request = checked_request(options, device, allocator, extras, batch_size, cudnn)
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
    notes = checked_torch(*(() if request.options.parallel == "none" else ("parallel",)))
    from gpumemnet.extract.inputs import as_model_inputs
    from gpumemnet.tracing.model_tracer import ModelTracer

    return ModelTracer(model, as_model_inputs(inputs, batch_size), request, notes).answer()


def checked_torch(*uses: str) -> tuple[str, ...]:
    """Notes on the installed PyTorch, see :func:`~gpumemnet.torch_private.names.check_torch`."""
    try:
        from gpumemnet.torch_private.names import check_torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError("torch", "extract", "tracing a model") from None
    return check_torch(*uses)
