"""Extracts a job from a user's file in a child process, so that the file meets nothing of the caller's and cannot harm it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from gpumemnet.extract.options import DEFAULT_OPTIONS, ExtractOptions, check_batch_size
from gpumemnet.extract.result import Extraction, extraction_from_dict
from gpumemnet.extract.source import factory_question
from gpumemnet.sandbox.parent import Child, ask

DEADLINE_SECONDS: Final = 120.0
_CHILD: Final = Child(module="gpumemnet.extract.child", wanted="a model", purpose="extracting a job from a model")


def extract_file(
    source: str,
    options: ExtractOptions = DEFAULT_OPTIONS,
    *,
    inputs: Sequence[str] = (),
    arguments: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    show_output: bool = False,
) -> Extraction:
    """The training job of the model that ``source`` builds.

    Args:
        source: ``path/to/file.py:factory``; the factory returns a ``torch.nn.Module`` or ``(model, inputs)``.
        options: how the model is trained, and facts that override the model's.
        inputs: one sample's shape for each of the model's inputs, as :func:`gpumemnet.extract.inputs.parse_input` reads them;
            none where the factory gives the inputs.
        arguments: keyword arguments for the factory; anything that JSON can hold.
        batch_size: samples per batch; needed unless the factory gives the inputs.
        deadline_seconds: time for everything, the import of torch included.
        show_output: let the file's own output through to standard error.

    Raises:
        ExtractError: one sentence on what is wrong with the file, its factory or its model, and where.
        InvalidJobError, InvalidRequestError: when an input has no such value, or the batch size is out of its limits.
        MissingExtraError: when torch is not installed.
    """
    check_batch_size(batch_size)
    question = {**factory_question(source, inputs, arguments, batch_size), "options": asdict(options)}
    answer = ask(_CHILD, source, question, deadline_seconds=deadline_seconds, show_output=show_output)
    return extraction_from_dict(answer)
