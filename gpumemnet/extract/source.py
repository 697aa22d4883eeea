"""What ``path/to/file.py:factory`` stands for: a question that a parent process can ask, and the model that a child builds of it.

The two halves stand side by side because they have to agree; the parent's loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from gpumemnet.errors import ExtractError
from gpumemnet.extract.factory import Built, call_factory, compile_file, load_module, split_source
from gpumemnet.extract.inputs import ModelInputs, inputs_from_example, inputs_from_specs, parse_input

if TYPE_CHECKING:
    from gpumemnet.extract.placement import Unknowns


def factory_question(
    source: str, inputs: Sequence[str], arguments: Mapping[str, Any] | None, batch_size: int | None
) -> dict[str, Any]:
    """The part of a question that says which model is meant, as JSON.

    Args:
        source: ``path/to/file.py:factory``.
        inputs: one sample's shape for each of the model's inputs, as :func:`gpumemnet.extract.inputs.parse_input` reads them.
        arguments: keyword arguments for the factory.
        batch_size: samples per batch.

    Raises:
        ExtractError: when there is no such file.
        InvalidRequestError: when an input has no such form.
    """
    file, name = split_source(source)
    return {
        "file": str(file),
        "name": name,
        "arguments": dict(arguments or {}),
        "inputs": [str(parse_input(text)) for text in inputs],
        "batch_size": batch_size,
    }


def source_code(question: Mapping[str, Any]) -> CodeType:
    """The code of the file that a question means: known to be Python before torch is imported, which takes seconds.

    Raises:
        ExtractError: when the file cannot be read or is no Python.
    """
    return compile_file(Path(question["file"]))


def build(
    question: Mapping[str, Any], code: CodeType, *, unknowns: Unknowns | None = None, with_loss: bool = False
) -> tuple[Built, ModelInputs]:
    """The model that a question means, and its inputs as meta tensors of the wanted batch size.

    Args:
        question: from :func:`factory_question`.
        code: from :func:`source_code`.
        unknowns: see :func:`gpumemnet.extract.placement.placement`.
        with_loss: whether the factory may also return a loss.

    Raises:
        ExtractError: one sentence on what is wrong with the file or its factory, or what the question lacks.
    """
    from gpumemnet.extract.placement import placement

    leave_machine_alone()
    name, batch_size = question["name"], question["batch_size"]
    specs = [parse_input(text) for text in question["inputs"]]
    with placement(unknowns):
        built = call_factory(load_module(Path(question["file"]), code), name, question["arguments"], with_loss=with_loss)
    if built.inputs is not None:
        if specs:
            raise ExtractError(f"{name}() gives inputs itself: leave out --input")
        return built, inputs_from_example(built.inputs, batch_size)
    if not specs:
        raise ExtractError(f"{name}() gives no inputs: say them with --input, such as --input 3x224x224")
    if batch_size is None:
        raise ExtractError("the batch size is missing: say it with --batch-size")
    return built, inputs_from_specs(specs, batch_size)


def leave_machine_alone() -> None:
    """Let weights files be opened without their weights, and default devices be set without effect; for a child process."""
    import torch

    load: Callable[..., Any] = torch.load

    @wraps(load)
    def load_shapes(*args: Any, **kwargs: Any) -> Any:
        return load(*args[:1], **{**kwargs, "map_location": "meta"})

    torch.load = load_shapes
    torch.set_default_device = lambda device: None
    torch.cuda.set_device = lambda device: None
