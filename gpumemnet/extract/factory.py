"""``path/to/file.py:factory``: the request that a parent process writes for it, and the model that
the child builds from it, with inputs.

On the command line an input has no batch dimension: ``3x224x224`` or ``1024:int64``, with ``name=``
first for a keyword argument.

The child runs the file as Python runs a script, and calls the factory.  The file's folder comes
first on ``sys.path``, so its neighbours import as they do for its owner; the file is not
``__main__``, so a training loop under ``if __name__ == "__main__"`` stays where it is.  Writer and
reader of a request are in one module, because they must agree.  The writer loads no torch.
"""

from __future__ import annotations

import ast
import json
import linecache
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce, wraps
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, Final, cast

from gpumemnet.atomic_files import Document
from gpumemnet.errors import ExtractError, InvalidRequestError, did_you_mean
from gpumemnet.job.layers import MAX_ELEMENTS, check_count, describe
from gpumemnet.job.training_job import MAX_BATCH_SIZE
from gpumemnet.sandbox.user_code import fault_sentence

if TYPE_CHECKING:
    from torch import nn

    from gpumemnet.extract.module_calls import ModelInputs
    from gpumemnet.extract.placement import MissingValues

DTYPES: Final = (
    *("float32", "float16", "bfloat16", "float64", "complex64"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
_SPEC: Final = re.compile(
    r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<shape>[0-9]{1,16}(?:x[0-9]{1,16})*)(?::(?P<dtype>\w+))?",
    re.ASCII,
)
_MISSING: Final = object()
_OTHER_LANGUAGE: Final = re.compile(r"%%(?!time|capture)")
_COMMAND: Final = re.compile(r"^(\s*)[!%].*")


@dataclass(frozen=True)
class InputSpec:
    """One input of a model.

    Attributes:
        shape: dimensions of one sample, without the batch dimension.
        dtype: one of :data:`DTYPES`.
        name: keyword under which the model takes it, or ``None`` when it is positional.
    """

    shape: tuple[int, ...]
    dtype: str
    name: str | None


def parse_input(text: str) -> InputSpec:
    """Parse an input of the form ``[name=]D1xD2x…[:dtype]``.

    Raises:
        InvalidRequestError: shows the form, or lists the dtypes.
    """
    match = _SPEC.fullmatch(text)
    if match is None:
        raise InvalidRequestError(
            f"must look like 3x224x224, 1024:int64 or mask=128:bool (no batch dimension), not {describe(text)}",
            "input",
        )
    shape = tuple(map(int, match["shape"].split("x")))
    if 0 in shape or math.prod(shape) > MAX_ELEMENTS:
        raise InvalidRequestError(
            f"must have dimensions above 0 and at most 2**50 elements, not {describe(text)}",
            "input",
        )
    dtype = match["dtype"] or "float32"
    if dtype not in DTYPES:
        raise InvalidRequestError(
            f"must have a dtype of {', '.join(DTYPES)}, not {describe(dtype)}", "input"
        )
    return InputSpec(shape, dtype, match["name"])


def inputs_from_specs(specs: Sequence[InputSpec], batch_size: int) -> ModelInputs:
    """Return meta tensors ``[batch_size, *shape]`` for ``specs``; small ones of whole numbers are
    ones, as a mask of unpadded samples is."""
    import torch

    from gpumemnet.extract.module_calls import ModelInputs, keeps_values

    def tensor(spec: InputSpec) -> torch.Tensor:
        dtype = getattr(torch, spec.dtype)
        made = torch.empty(batch_size, *spec.shape, dtype=dtype, device="meta")
        return torch.ones(made.shape, dtype=dtype) if keeps_values(made) else made

    args = tuple(tensor(spec) for spec in specs if spec.name is None)
    kwargs = {spec.name: tensor(spec) for spec in specs if spec.name is not None}
    return ModelInputs(args, kwargs, batch_size)


@dataclass(frozen=True, eq=False)
class Built:
    """What a factory returned.

    Attributes:
        model: the model.
        inputs: what it is called with, if the factory says.
        loss: a function of the model's output, if the factory says.
    """

    model: nn.Module
    inputs: object | None = None
    loss: Callable[[Any], Any] | None = None


def split_source(source: str) -> tuple[Path, str]:
    """File and factory name of ``path/to/file.py:factory``.

    Raises:
        ExtractError: when the text has another form, or there is no such file.
    """
    path, colon, name = source.rpartition(":")
    if not colon or not path or not name.replace(".", "").isidentifier():
        raise ExtractError(
            f"{describe(source)} does not name a factory: write path/to/file.py:function"
        )
    return existing_file(path), name


def existing_file(path: str) -> Path:
    """The whole path of a file.

    Raises:
        ExtractError: when there is no such file.
    """
    file = Path(path)
    if not file.is_file():
        raise ExtractError(
            f"there is no file {path}" if not file.exists() else f"{path} is no file"
        )
    return file.resolve()


def compile_file(
    file: Path, change: Callable[[ast.Module], ast.Module] = lambda tree: tree
) -> CodeType:
    """The code of ``file``, a script or a notebook, once ``change`` has changed it.

    Raises:
        ExtractError: when the file cannot be read or is no Python.
    """
    try:
        source = file.read_bytes()
        if file.suffix == ".ipynb":
            source = _notebook_code(source)
            lines = source.decode().splitlines(keepends=True)
            linecache.cache[str(file)] = (len(source), None, lines, str(file))
        with suppress(SyntaxError, RecursionError):  # perhaps of the changed code alone
            tree = change(ast.parse(source, str(file)))
            return compile(tree, str(file), "exec", dont_inherit=True)
        return compile(source, str(file), "exec", dont_inherit=True)
    except OSError as error:
        raise ExtractError(f"{file.name} cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise ExtractError(f"{file.name} is no valid Python: {fault_sentence(error)}") from error


def _notebook_code(document: bytes) -> bytes:
    """The code of a Jupyter notebook's cells, without what only a notebook understands: commands
    of IPython, and cells in other languages."""
    lines: list[str] = []
    for cell in json.loads(document).get("cells", ()):
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and not _OTHER_LANGUAGE.match(source):
            lines += [_COMMAND.sub(r"\1pass", line) for line in source.splitlines()]
    return "\n".join(lines).encode()


def load_module(file: Path, code: CodeType) -> ModuleType:
    """Run the code of ``file`` as a module, registered under the file's stem where that name is
    free.

    Raises:
        ExtractError: when the code raises.
    """
    name = file.stem if file.stem not in sys.modules else f"_extracted_{file.stem}"
    module = ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))
    sys.argv = [str(file)]
    try:
        exec(code, module.__dict__)  # noqa: S102 - running the user's file is the purpose
    except Exception as error:
        raise ExtractError(f"{file.name} cannot be loaded: {fault_sentence(error)}") from error
    return module


def call_factory(module: ModuleType, name: str, arguments: Mapping[str, Any]) -> Built:
    """The model that ``name`` in ``module`` builds, and what comes with it.

    Args:
        module: from :func:`load_module`.
        name: a function, a class or a ready model; dots lead into attributes.
        arguments: keyword arguments of the call.

    Raises:
        ExtractError: when there is no such name, the call raises, or what it returns is no model.
    """
    from torch import nn

    factory: Any = reduce(
        lambda value, part: getattr(value, part, _MISSING), name.split("."), cast(Any, module)
    )
    where = Path(str(module.__file__)).name
    if factory is _MISSING:
        known = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_")
        ]
        hint = did_you_mean(name, known)
        raise ExtractError(f"{where} has no '{name}'{hint and f': {hint}'}")
    if isinstance(factory, nn.Module):
        return Built(factory)
    if not callable(factory):
        raise ExtractError(
            f"'{name}' in {where} is {describe(factory)}, not a function that returns a model"
        )
    try:
        built = factory(**arguments)
    except Exception as error:
        raise ExtractError(f"{name}() failed: {fault_sentence(error)}") from error
    parts = built if isinstance(built, tuple) and len(built) in (2, 3) else (built,)
    if not isinstance(parts[0], nn.Module):
        raise ExtractError(
            f"{name}() in {where} must return a torch.nn.Module, (model, inputs) or (model, inputs, loss), "
            f"and returned {_described(built)}"
        )
    if len(parts) == 3 and not callable(parts[2]):
        raise ExtractError(
            f"{name}() in {where} must return a function as loss, and returned {_described(parts[2])}"
        )
    return Built(*parts)


def _described(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: ({', '.join(type(entry).__name__ for entry in value)})"
    return "None" if value is None else describe(value)


def check_batch_size(batch_size: int | None, field: str = "batch_size") -> None:
    """Check a batch size before any model is loaded; ``None`` is that of the inputs.

    Raises:
        InvalidJobError: names its limits.
    """
    if batch_size is not None:
        check_count(batch_size, field, 1, MAX_BATCH_SIZE)


def factory_request(
    source: str,
    inputs: Sequence[str] | None = None,
    arguments: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
) -> Document:
    """Return the part of a request that names the model, as JSON.

    Args:
        source: ``path/to/file.py:factory``; the factory returns a ``torch.nn.Module``, ``(model,
            inputs)`` or, for a trace, ``(model, inputs, loss)``, where ``loss`` is a function from
            the model's output to a scalar.
        inputs: shape of one sample for each input of the model, as :func:`parse_input` reads it;
            none if the factory returns inputs.
        arguments: keyword arguments of the factory; any JSON values.
        batch_size: samples per batch; required unless the factory returns inputs.

    Raises:
        ExtractError: there is no such file.
        InvalidJobError, InvalidRequestError: the batch size is out of range, or an input has
            another form.
    """
    check_batch_size(batch_size)
    file, name = split_source(source)
    for text in inputs or ():
        parse_input(text)
    return {
        "source": source,
        "file": str(file),
        "name": name,
        "arguments": dict(arguments or {}),
        "inputs": list(inputs or ()),
        "batch_size": batch_size,
    }


def source_code(request: Mapping[str, Any]) -> CodeType:
    """Compile the file that a request names, before torch is imported, which takes seconds.

    Raises:
        ExtractError: the file cannot be read or is not valid Python.
    """
    return compile_file(Path(request["file"]))


def build(
    request: Mapping[str, Any], code: CodeType, missing_values: MissingValues | None = None
) -> tuple[Built, ModelInputs]:
    """Build the model that a request names, and its inputs as meta tensors with the requested batch
    size.

    Args:
        request: from :func:`factory_request`.
        code: from :func:`source_code`.
        missing_values: see :func:`gpumemnet.extract.placement.placement`.

    Raises:
        ExtractError: says what is wrong with the file or its factory, or what is missing in the
            request.
    """
    from gpumemnet.extract.module_calls import inputs_from_example
    from gpumemnet.extract.placement import placement

    prepare_child()
    name, batch_size = request["name"], request["batch_size"]
    specs = [parse_input(text) for text in request["inputs"]]
    with placement(missing_values):
        module = load_module(Path(request["file"]), code)
        built = call_factory(module, name, request["arguments"])
    if built.inputs is not None:
        if specs:
            raise ExtractError(f"--input: {name}() returns inputs itself; leave --input out")
        return built, inputs_from_example(built.inputs, batch_size)
    if not specs:
        raise ExtractError(
            f"--input: {name}() returns no inputs; give them, as in --input 3x224x224"
        )
    if batch_size is None:
        raise ExtractError("--batch-size: is missing; give the number of samples per step")
    return built, inputs_from_specs(specs, batch_size)


def prepare_child() -> None:
    """Open files of weights without reading the weights, and ignore default devices, until this
    child process ends."""
    import torch

    from gpumemnet.torch_private.names import declare_torchvision_operators

    declare_torchvision_operators()
    load: Callable[..., Any] = torch.load

    @wraps(load)
    def load_shapes(*args: Any, **kwargs: Any) -> Any:
        return load(*args[:1], **{**kwargs, "map_location": "meta"})

    vars(torch).update(load=load_shapes, set_default_device=lambda device: None)
    vars(torch.cuda).update(set_device=lambda device: None)
