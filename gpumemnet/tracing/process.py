"""Traces a user's file or script in a child process, so that user code cannot affect the caller."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from gpumemnet.allocator.settings import AllocatorSettings
from gpumemnet.cudnn.session import OFF
from gpumemnet.extract.factory import existing_file
from gpumemnet.extract.options import DEFAULT_GPU
from gpumemnet.extract.source import build, factory_request, source_code
from gpumemnet.gpu.catalogue import DeviceProfile
from gpumemnet.sandbox.process import Progress, ask
from gpumemnet.tracing.api import trace_request
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
from gpumemnet.tracing.report.answer import TraceAnswer, answer_from_dict, answer_to_dict
from gpumemnet.tracing.script.both_ways import larger_way

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
            :func:`gpumemnet.extract.inputs.parse_input` reads it; empty if the factory returns
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

    def trace(other_way: bool, selected_share: float) -> TraceAnswer:
        asked = {**request, "other_way": other_way, "selected_share": selected_share}
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

    return larger_way(trace)


def _trace(document: dict[str, Any]) -> dict[str, Any]:
    trace_source = _script_in_child if document["kind"] == "script" else _file_in_child
    return answer_to_dict(trace_source(document, request_from_dict(document)))


def _script_in_child(document: dict[str, Any], request: TraceRequest) -> TraceAnswer:
    _LOG.info("importing torch")
    from gpumemnet.tracing.platform import Platform, with_cudnn
    from gpumemnet.tracing.script import batches, run

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
        other_way=document["other_way"],
        selected_share=document["selected_share"],
        best_effort=request.options.best_effort,
    )
    extras = request.extras
    if extras.batches or extras.max_batch:
        answer = batches.trace_batches(call, extras, document["batch_argument"])
    else:
        answer = run.trace_script(call, with_curve=extras.curve)
    return replace(answer, notes=(*answer.notes, *notes))


def _file_in_child(document: dict[str, Any], request: TraceRequest) -> TraceAnswer:
    code = source_code(document)
    _LOG.info("importing torch")
    from gpumemnet.torch_private.training import without_dynamo
    from gpumemnet.tracing.missing_values import GuessedValues, RefusedValues

    _LOG.info("building the model")
    missing_values = GuessedValues() if request.options.best_effort else RefusedValues()
    with without_dynamo():
        built, inputs = build(
            document, code, missing_values=missing_values, with_loss=True, keep_values=True
        )
        options = (
            request.options if built.loss is None else replace(request.options, loss=built.loss)
        )
        answer = trace_request(built.model, inputs, replace(request, options=options))
    return replace(answer, notes=(*missing_values.notes, *answer.notes))
