"""Traces a user's file or script in a child process, so that it meets nothing of the caller's and cannot harm it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gpumemnet.allocator.settings import AllocatorSettings
from gpumemnet.extract.factory import existing_file
from gpumemnet.extract.source import factory_question
from gpumemnet.gpu.catalogue import DeviceProfile
from gpumemnet.sandbox.parent import Child, Progress, ask
from gpumemnet.tracing.options import DEADLINE_SECONDS, DEFAULT_GPU, DEFAULT_OPTIONS, Questions, TraceOptions
from gpumemnet.tracing.parallel.plan import check_ranks
from gpumemnet.tracing.report.answer import TraceAnswer, answer_from_dict
from gpumemnet.tracing.request import asked, asked_to_dict

_CHILD: Final = Child(module="gpumemnet.tracing.child", wanted="an answer", purpose="tracing a model")


def trace_file(
    source: str,
    options: TraceOptions = DEFAULT_OPTIONS,
    *,
    inputs: Sequence[str] = (),
    arguments: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    gpu: str | DeviceProfile = DEFAULT_GPU,
    allocator: AllocatorSettings | None = None,
    questions: Questions | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    show_output: bool = False,
    progress: Progress | None = None,
) -> TraceAnswer:
    """The memory that training the model takes which ``source`` builds.

    Args:
        source: ``path/to/file.py:factory``; the factory returns a ``torch.nn.Module``, ``(model, inputs)`` or
            ``(model, inputs, loss)``, where ``loss`` is a function from the model's output to a scalar.
        options: how the model is trained, in words and numbers.
        inputs: one sample's shape for each of the model's inputs, as :func:`gpumemnet.extract.inputs.parse_input` reads them;
            none where the factory gives the inputs.
        arguments: keyword arguments for the factory; anything that JSON can hold.
        batch_size: samples per step; needed unless the factory gives the inputs.
        gpu: name or alias of a GPU of the catalogue, path of a profile's ``.json`` file, or a profile.
        allocator: settings of the caching allocator; PyTorch's defaults unless given.
        questions: what else is wanted.
        deadline_seconds: time for everything, the import of torch included.
        show_output: let the file's own output through to standard error.
        progress: told in a few words what is being done.

    Raises:
        ExtractError: one sentence that names the operator or the line of code that cannot be traced.
        InvalidJobError, InvalidRequestError: when an input has no such value, or options do not go together.
        MissingExtraError: when torch is not installed.
    """
    question = {
        "kind": "file",
        **factory_question(source, inputs, arguments, batch_size),
        **asked_to_dict(asked(options, gpu, allocator, questions, batch_size)),
    }
    answer = ask(_CHILD, source, question, deadline_seconds=deadline_seconds, show_output=show_output, progress=progress)
    return answer_from_dict(answer)


def trace_script(
    script: Path | str,
    arguments: Sequence[str] = (),
    *,
    gpu: str | DeviceProfile = DEFAULT_GPU,
    allocator: AllocatorSettings | None = None,
    attention_kernel: str | None = None,
    ranks: int = 1,
    with_curve: bool = False,
    deadline_seconds: float = DEADLINE_SECONDS,
    show_output: bool = False,
    progress: Progress | None = None,
) -> TraceAnswer:
    """The memory that an unmodified training script takes; it really runs, on a GPU that is not there, up to its second step.

    Args:
        script: the file.
        arguments: what follows the script's name on its command line.
        gpu, allocator, deadline_seconds, show_output, progress: as in :func:`trace_file`.
        attention_kernel: the scaled-dot-product kernel to use; ``None`` for the one that PyTorch would choose.
        ranks: on how many GPUs the script is started; it is traced as the first of them, as ``torchrun`` would start it.
        with_curve: whether the memory over a step is wanted.

    Raises:
        ExtractError: one sentence that names what cannot be traced, and the line of the script.
        InvalidJobError, InvalidRequestError: when a setting has no such value.
        MissingExtraError: when torch is not installed.
    """
    question = {
        "kind": "script",
        "script": str(existing_file(str(script))),
        "arguments": list(arguments),
        "ranks": check_ranks(ranks),
        **asked_to_dict(asked(TraceOptions(attention_kernel=attention_kernel), gpu, allocator, Questions(curve=with_curve))),
    }
    answer = ask(_CHILD, str(script), question, deadline_seconds=deadline_seconds, show_output=show_output, progress=progress)
    return answer_from_dict(answer)
