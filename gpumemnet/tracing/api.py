"""``gpumemnet.trace`` for a model object, :func:`trace_file` for a file that builds one, and
:func:`trace_script` for a training script.

Files and scripts run in a child process, so that user code cannot affect the caller.  A script that
branches on values of the GPU is traced both ways, because nothing computes them; the larger result
counts.

This module loads no torch; the first call does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpumemnet.allocator.settings import AllocatorSettings
from gpumemnet.cudnn.session import OFF
from gpumemnet.errors import ExtractError, MissingExtraError
from gpumemnet.extract.extraction import DEFAULT_GPU
from gpumemnet.extract.factory import build, existing_file, factory_request, source_code
from gpumemnet.gpu import DeviceProfile, asked_profile
from gpumemnet.sandbox.process import Progress, ask
from gpumemnet.tracing.options import (
    DEADLINE_SECONDS,
    DEFAULT_OPTIONS,
    ExtraResults,
    TraceOptions,
    TraceRequest,
    check_ranks,
    checked_request,
    request_from_dict,
)
from gpumemnet.tracing.result import TraceAnswer, answer_from_dict, answer_to_dict
from gpumemnet.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from gpumemnet.allocator import AllocatorSettings
    from gpumemnet.gpu import DeviceProfile
    from gpumemnet.tracing.result import TraceAnswer


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
    notes = checked_torch()
    from gpumemnet.extract.module_calls import as_model_inputs
    from gpumemnet.tracing.model_tracer import ModelTracer

    return ModelTracer(model, as_model_inputs(inputs, batch_size), request, notes).answer()


def checked_torch() -> tuple[str, ...]:
    """Notes on the installed PyTorch, see :func:`~gpumemnet.torch_private.names.check_torch`."""
    try:
        from gpumemnet.torch_private.names import check_torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingExtraError("torch", "extract", "tracing a model") from None
    return check_torch()


_LOG: Final = logging.getLogger("gpumemnet.tracing")
_PURPOSE: Final = "tracing a model"


def trace_file(
    source: str,
    options: TraceOptions = DEFAULT_OPTIONS,
    *,
    inputs: Sequence[str] = (),
    arguments: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    gpu: str | DeviceProfile = DEFAULT_GPU,
    allocator: AllocatorSettings | None = None,
    cudnn: str = OFF,
    extras: ExtraResults | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    show_output: bool = False,
    progress: Progress | None = None,
) -> TraceAnswer:
    """Predict the memory of training the model that ``source`` builds.

    Args:
        source: ``path/to/file.py:factory``; the factory returns a ``torch.nn.Module``, ``(model,
            inputs)`` or ``(model, inputs, loss)``, where ``loss`` is a function from the model's
            output to a scalar.
        options: how the model is trained; words, numbers and switches only.
        inputs: shape of one sample for each input of the model, as
            :func:`gpumemnet.extract.factory.parse_input` reads it; empty if the factory returns
            inputs.
        arguments: keyword arguments of the factory; any JSON values.
        batch_size: samples per step; required unless the factory returns inputs.
        gpu: name or alias of a GPU in the catalogue, path of a profile's ``.json`` file, or a
            profile.
        allocator: settings of the caching allocator; PyTorch's defaults by default.
        cudnn: ``off``, ``auto`` or the path of a cuDNN library, see :func:`gpumemnet.trace`.
        extras: further results to compute.
        deadline_seconds: time for everything, including the import of torch.
        show_output: whether to pass the file's own output on to standard error.
        progress: called with a few words at each stage.

    Returns:
        the answer; all amounts are in bytes, for one GPU.

    Raises:
        ExtractError: names the operator or the line of code that cannot be traced.
        InvalidJobError, InvalidRequestError: an input has another form, or options exclude each
            other.
        MissingExtraError: torch is not installed.
    """
    request = {
        "kind": "file",
        **factory_request(source, inputs, arguments, batch_size),
        **asdict(checked_request(options, gpu, allocator, extras, batch_size, cudnn)),
    }
    answer = ask(
        _trace,
        source,
        request,
        purpose=_PURPOSE,
        deadline_seconds=deadline_seconds,
        show_output=show_output,
        progress=progress,
    )
    return answer_from_dict(answer)


def trace_script(
    script: Path | str,
    arguments: Sequence[str] = (),
    *,
    gpu: str | DeviceProfile = DEFAULT_GPU,
    allocator: AllocatorSettings | None = None,
    cudnn: str = OFF,
    attention_kernel: str | None = None,
    best_effort: bool = False,
    is_module: bool = False,
    ranks: int | None = None,
    variables: Mapping[str, str] | None = None,
    extras: ExtraResults | None = None,
    batch_argument: str | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    show_output: bool = False,
    progress: Progress | None = None,
) -> TraceAnswer:
    """Predict the memory of an unmodified training script.

    The script really runs, on a simulated GPU, up to its second optimizer step; twice if it
    branches on values of the GPU.

    Args:
        script: the file, or the dotted name of a module.
        arguments: command-line arguments of the script.
        gpu, allocator, cudnn, deadline_seconds, show_output, progress: as in :func:`trace_file`.
        attention_kernel: the scaled-dot-product kernel to use; the kernel that PyTorch would choose
            by default.
        best_effort: whether to continue with a guess where an operator of another library does not
            describe its output.
        is_module: whether it is a module, to be run as by ``python -m`` in this folder.
        ranks: number of GPUs that the script is started on by ``torchrun``, as whose first rank it
            is traced; ``None`` if it is started alone.
        variables: further environment variables of the script.
        extras: further results: the memory over one training step, and other batch sizes, for which
            the script is run again.
        batch_argument: the script's argument that sets its batch size; found by its name and value
            by default.

    Returns:
        the answer; all amounts are in bytes, for one GPU.

    Raises:
        ExtractError: names what cannot be traced, and the line of the script.
        InvalidJobError, InvalidRequestError: an option has no such value.
        MissingExtraError: torch is not installed.
    """
    options = TraceOptions(attention_kernel=attention_kernel, best_effort=best_effort)
    request = {
        "kind": "script",
        "script": str(script) if is_module else str(existing_file(str(script))),
        "is_module": is_module,
        "arguments": list(arguments),
        "ranks": None if ranks is None else check_ranks(ranks),
        "batch_argument": batch_argument,
        **asdict(checked_request(options, gpu, allocator, extras, cudnn=cudnn)),
    }

    def trace(conditions_hold: bool, selected_share: float) -> TraceAnswer:
        asked = {**request, "conditions_hold": conditions_hold, "selected_share": selected_share}
        answer = ask(
            _trace,
            str(script),
            asked,
            purpose=_PURPOSE,
            variables=variables,
            deadline_seconds=deadline_seconds,
            show_output=show_output,
            progress=progress,
        )
        return answer_from_dict(answer)

    return larger_of_both_branches(trace)


def _trace(document: dict[str, Any]) -> dict[str, Any]:
    trace_source = _script_in_child if document["kind"] == "script" else _file_in_child
    return answer_to_dict(trace_source(document, request_from_dict(document)))


def _script_in_child(document: dict[str, Any], request: TraceRequest) -> TraceAnswer:
    _LOG.info("importing torch")
    from gpumemnet.tracing.operators.rules import Platform, with_cudnn
    from gpumemnet.tracing.script import batch_sizes, run

    _LOG.info("running up to the second step")
    platform = Platform(device=request.gpu, attention_kernel=request.options.attention_kernel)
    platform, notes = with_cudnn(platform, request.cudnn)
    call = run.ScriptCall(
        script=Path(document["script"]),
        arguments=tuple(document["arguments"]),
        platform=platform,
        settings=request.allocator,
        is_module=document["is_module"],
        ranks=document["ranks"],
        conditions_hold=document["conditions_hold"],
        selected_share=document["selected_share"],
        best_effort=request.options.best_effort,
    )
    extras = request.extras
    if extras.batches or extras.max_batch:
        answer = batch_sizes.trace_batches(call, extras, document["batch_argument"])
    else:
        answer = run.trace_script(call, with_curve=extras.curve)
    return replace(answer, notes=(*answer.notes, *notes))


def _file_in_child(document: dict[str, Any], request: TraceRequest) -> TraceAnswer:
    code = source_code(document)
    _LOG.info("importing torch")
    from gpumemnet.extract.placement import MissingValues
    from gpumemnet.torch_private.training import without_dynamo
    from gpumemnet.tracing.missing_values import GuessedValues, guess_of

    _LOG.info("building the model")
    missing_values = GuessedValues() if request.options.best_effort else MissingValues(guess_of)
    with without_dynamo():
        built, inputs = build(document, code, missing_values)
        options = (
            request.options if built.loss is None else replace(request.options, loss=built.loss)
        )
        answer = trace_request(built.model, inputs, replace(request, options=options))
    return replace(answer, notes=(*missing_values.notes, *answer.notes))


TraceScript = Callable[[bool, float], TraceAnswer]
"""Traces the script: whether conditions are true and numbers 1 (else false and 0), and the share of
elements that is selected."""


def larger_of_both_branches(trace: TraceScript) -> TraceAnswer:
    """Return the answer for a script, the larger of two where it branches on values of the GPU.

    Where it selects elements by values of the GPU, the expectation is that of half of them, and the
    bound that of all.

    Args:
        trace: traces the script.

    Raises:
        ExtractError: as ``trace`` does with conditions that are false and all elements selected.
    """
    answer, conditions_hold = _with_and_without_conditions(trace)
    if not answer.selections:
        return answer
    where = "; ".join(answer.selections)
    try:
        half = trace(conditions_hold, 0.5)
    except ExtractError as error:
        note = f"{where}: selects elements by values of the GPU; all count, because half of them end without a step: {error}."
        return replace(answer, notes=(*answer.notes, note))
    note = f"{where}: selects elements by values of the GPU; half of them are expected, and the safe bytes hold all."
    return replace(
        half,
        safe_bytes=max(half.safe_bytes, answer.safe_bytes),
        batches=answer.batches,
        max_batch_size=answer.max_batch_size,
        notes=(*answer.notes, note),
        branches=answer.branches,
        selections=answer.selections,
    )


def _with_and_without_conditions(trace: TraceScript) -> tuple[TraceAnswer, bool]:
    answer = trace(False, 1)
    if not answer.branches:
        return answer, False
    where = "; ".join(answer.branches)
    try:
        other = trace(True, 1)
    except ExtractError as error:
        note = f"{where}: branches on values of the GPU; the other way (conditions true, numbers 1) ends without a step: {error}."
        return replace(answer, notes=(*answer.notes, note)), False
    smaller, larger = sorted((answer, other), key=lambda each: each.safe_bytes)
    note = (
        f"{where}: branches on values of the GPU; both ways were traced, and this is the larger one "
        f"(the other: {smaller.expected_bytes / MIB:,.0f} MiB expected)."
    )
    return replace(larger, notes=(*larger.notes, note), branches=answer.branches), larger is other
