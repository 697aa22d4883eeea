"""Traces a user's file or script in a child process, so that user code cannot affect the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gpumemnet.allocator.settings import AllocatorSettings
from gpumemnet.cudnn.libraries import OFF
from gpumemnet.extract.factory import existing_file
from gpumemnet.extract.options import DEFAULT_GPU
from gpumemnet.extract.source import factory_request
from gpumemnet.gpu.catalogue import DeviceProfile
from gpumemnet.sandbox.parent import Child, Progress, ask
from gpumemnet.tracing.options import (
    DEADLINE_SECONDS,
    DEFAULT_OPTIONS,
    ExtraResults,
    TraceOptions,
    check_ranks,
    checked_request,
)
from gpumemnet.tracing.report.answer import TraceAnswer, answer_from_dict
from gpumemnet.tracing.script.both_ways import larger_way

_CHILD: Final = Child(
    module="gpumemnet.tracing.child", result="an answer", purpose="tracing a model"
)


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
        _CHILD,
        source,
        request,
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
            _CHILD,
            str(script),
            asked,
            variables=variables,
            deadline_seconds=deadline_seconds,
            show_output=show_output,
            progress=progress,
        )
        return answer_from_dict(answer)

    return larger_way(trace)
