"""``gpumemnet.plan``: how the training of a model object fits a GPU, for other people's programs.

This module loads no torch; the first call does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumemnet.cudnn.session import OFF
from gpumemnet.extract.options import DEFAULT_GPU
from gpumemnet.gpu.catalogue import asked_profile
from gpumemnet.planner.answer import PlanAnswer
from gpumemnet.planner.options import DEFAULT_PLANNER, PlanRequest, within_budget
from gpumemnet.tracing.api import checked_torch
from gpumemnet.tracing.options import ExtraResults, TraceOptions, checked_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from gpumemnet.allocator import AllocatorSettings
    from gpumemnet.gpu.catalogue import DeviceProfile


def plan(
    model: nn.Module,
    inputs: object,
    *,
    budget_bytes: int | None = None,
    gpu: str | DeviceProfile = DEFAULT_GPU,
    planner: str = DEFAULT_PLANNER,
    machine: str | None = None,
    host_bytes: int | None = None,
    with_alternatives: bool = True,
    with_searches: bool = False,
    loss: str | nn.Module | Callable[..., Tensor] = "auto",
    optimizer: str | Optimizer | Callable[..., Optimizer] = "adamw",
    precision: str = "fp32",
    batch_size: int | None = None,
    optimizer_implementation: str = "default",
    channels_last: bool = False,
    gradient_accumulation: int = 1,
    zero_grad: str = "before_forward",
    attention_kernel: str | None = None,
    cudnn_benchmark: bool = False,
    best_effort: bool = False,
    weight_decay: float | None = None,
    nesterov: bool = False,
    clip_norm: float | None = None,
    tf32: bool = True,
    context_mib: int | None = None,
    allocator: AllocatorSettings | None = None,
    cudnn: str = OFF,
) -> PlanAnswer:
    """Plan what a training step of ``model`` keeps, recomputes and swaps, so that it fits a GPU; no
    GPU is used.

    The model is left as it was; :func:`gpumemnet.planner.executor.applied` puts the plan in force.
    All times are modelled.

    Args:
        model, inputs, loss, optimizer, precision, batch_size, optimizer_implementation,
        channels_last, gradient_accumulation,
            zero_grad, attention_kernel, cudnn_benchmark, best_effort, weight_decay, nesterov,
            clip_norm, tf32, context_mib,
            allocator, cudnn, gpu: as in :func:`gpumemnet.trace`.
        budget_bytes: memory that the process may use; all that is available on the GPU by default.
        planner: the search, one of :data:`~gpumemnet.planner.options.PLANNERS`.
        machine: GPU of the catalogue, or path of a file, whose rates give the times; those of
            ``gpu`` by default.
        host_bytes: pinned host memory that swapped tensors may use; what the machine has by
            default.
        with_alternatives: whether to trace other settings of the job too, if it does not fit.
        with_searches: whether to run every search for several budgets too, and return the memory
            over a step, for pictures.

    Raises:
        ExtractError: names the operator or the line of code that cannot be traced.
        InvalidJobError, InvalidRequestError: an option has no such value, options exclude each
            other, or the GPU has no rates.
        MissingExtraError: torch is not installed.
        UnsupportedTorchError: the installed PyTorch lacks what a trace needs.

    Example:
        >>> import gpumemnet, torch
        >>> model = torch.nn.Linear(1024, 1024)
        >>> gpumemnet.plan(model, torch.empty(64, 1024), gpu="A100").outcome
        'fits'
    """
    named = {"optimizer": optimizer} if isinstance(optimizer, str) else {"own_optimizer": optimizer}
    options = TraceOptions(
        **named,
        precision=precision,
        optimizer_implementation=optimizer_implementation,
        channels_last=channels_last,
        gradient_accumulation=gradient_accumulation,
        zero_grad=zero_grad,
        attention_kernel=attention_kernel,
        cudnn_benchmark=cudnn_benchmark,
        loss=loss,
        best_effort=best_effort,
        weight_decay=weight_decay,
        nesterov=nesterov,
        clip_norm=clip_norm,
        tf32=tf32,
    )
    device = asked_profile(gpu, context_mib, "context_mib")
    extras = ExtraResults(curve=with_searches)
    request = PlanRequest(
        trace=within_budget(
            checked_request(options, device, allocator, extras, batch_size, cudnn), budget_bytes
        ),
        planner=planner,
        machine=machine,
        host_bytes=host_bytes,
        with_alternatives=with_alternatives,
        with_searches=with_searches,
    )
    notes = checked_torch()
    from gpumemnet.extract.inputs import as_model_inputs
    from gpumemnet.planner.fitting import plan_request

    return plan_request(model, as_model_inputs(inputs, batch_size), request, notes)
