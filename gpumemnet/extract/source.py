"""``path/to/file.py:factory``: the request that a parent process writes for it, and the model that
the child builds from it.

Writer and reader are in one module, because they must agree.  The writer loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from gpumemnet.errors import ExtractError
from gpumemnet.extract.factory import Built, call_factory, compile_file, load_module, split_source
from gpumemnet.extract.inputs import (
    ModelInputs,
    inputs_from_example,
    inputs_from_specs,
    parse_input,
)

if TYPE_CHECKING:
    from gpumemnet.extract.placement import MissingValues


def factory_request(
    source: str, inputs: Sequence[str], arguments: Mapping[str, Any] | None, batch_size: int | None
) -> dict[str, Any]:
    """Return the part of a request that names the model, as JSON.

    Args:
        source: ``path/to/file.py:factory``.
        inputs: shape of one sample for each input of the model, as
            :func:`gpumemnet.extract.inputs.parse_input` reads it.
        arguments: keyword arguments of the factory.
        batch_size: samples per batch.

    Raises:
        ExtractError: there is no such file.
        InvalidRequestError: an input has another form.
    """
    file, name = split_source(source)
    return {
        "file": str(file),
        "name": name,
        "arguments": dict(arguments or {}),
        "inputs": [str(parse_input(text)) for text in inputs],
        "batch_size": batch_size,
    }


def source_code(request: Mapping[str, Any]) -> CodeType:
    """Compile the file that a request names, before torch is imported, which takes seconds.

    Raises:
        ExtractError: the file cannot be read or is not valid Python.
    """
    return compile_file(Path(request["file"]))


def build(
    request: Mapping[str, Any],
    code: CodeType,
    *,
    missing_values: MissingValues | None = None,
    with_loss: bool = False,
    keep_values: bool = False,
) -> tuple[Built, ModelInputs]:
    """Build the model that a request names, and its inputs as meta tensors with the requested batch
    size.

    Args:
        request: from :func:`factory_request`.
        code: from :func:`source_code`.
        missing_values: see :func:`gpumemnet.extract.placement.placement`.
        with_loss: whether the factory may also return a loss.
        keep_values: see :func:`gpumemnet.extract.inputs.inputs_from_example`.

    Raises:
        ExtractError: says what is wrong with the file or its factory, or what is missing in the
            request.
    """
    from gpumemnet.extract.placement import placement

    prepare_child()
    name, batch_size = request["name"], request["batch_size"]
    specs = [parse_input(text) for text in request["inputs"]]
    with placement(missing_values):
        built = call_factory(
            load_module(Path(request["file"]), code),
            name,
            request["arguments"],
            with_loss=with_loss,
        )
    if built.inputs is not None:
        if specs:
            raise ExtractError(f"--input: {name}() returns inputs itself; leave --input out")
        return built, inputs_from_example(built.inputs, batch_size, keep_values)
    if not specs:
        raise ExtractError(
            f"--input: {name}() returns no inputs; give them, as in --input 3x224x224"
        )
    if batch_size is None:
        raise ExtractError("--batch-size: is missing; give the number of samples per step")
    return built, inputs_from_specs(specs, batch_size, keep_values)


def prepare_child() -> None:
    """Open files of weights without reading the weights, and ignore default devices, until this
    child process ends."""
    from gpumemnet.torch_private.modules import LOAD, SET_CUDA_DEVICE, SET_DEFAULT_DEVICE
    from gpumemnet.torch_private.names import replace_for_good

    load: Callable[..., Any] = LOAD.value()

    @wraps(load)
    def load_shapes(*args: Any, **kwargs: Any) -> Any:
        return load(*args[:1], **{**kwargs, "map_location": "meta"})

    replace_for_good(LOAD, load_shapes)
    replace_for_good(SET_DEFAULT_DEVICE, lambda device: None)
    replace_for_good(SET_CUDA_DEVICE, lambda device: None)
