"""Extracts a job from a user's file in a child process, so that user code cannot affect the
caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from gpumemnet.extract.options import DEFAULT_OPTIONS, ExtractOptions, check_batch_size
from gpumemnet.extract.result import Extraction, extraction_from_dict, extraction_to_dict
from gpumemnet.extract.source import build, factory_request, source_code
from gpumemnet.sandbox.process import ask

DEADLINE_SECONDS: Final = 120.0


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
    """Extract the training job of the model that ``source`` builds.

    Args:
        source: ``path/to/file.py:factory``; the factory returns a ``torch.nn.Module`` or ``(model,
            inputs)``.
        options: how the model is trained, and facts that override those of the model.
        inputs: shape of one sample for each input of the model, as
            :func:`gpumemnet.extract.inputs.parse_input` reads it; empty if the factory returns
            inputs.
        arguments: keyword arguments of the factory; any JSON values.
        batch_size: samples per batch; required unless the factory returns inputs.
        deadline_seconds: time for everything, including the import of torch.
        show_output: whether to pass the file's own output on to standard error.

    Raises:
        ExtractError: says what is wrong with the file, its factory or its model, and where.
        InvalidJobError, InvalidRequestError: an input has another form, or the batch size is out of
            range.
        MissingExtraError: torch is not installed.
    """
    check_batch_size(batch_size)
    request = {**factory_request(source, inputs, arguments, batch_size), "options": asdict(options)}
    answer = ask(
        _extract,
        source,
        request,
        purpose="extracting a job from a model",
        deadline_seconds=deadline_seconds,
        show_output=show_output,
    )
    return extraction_from_dict(answer)


def _extract(request: dict[str, Any]) -> dict[str, Any]:
    code = source_code(request)
    from gpumemnet.extract.extraction import extract_from

    built, inputs = build(request, code, keep_values=True)
    return extraction_to_dict(
        extract_from(built.model, inputs, ExtractOptions(**request["options"]))
    )
