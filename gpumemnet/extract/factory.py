"""Finds a model factory in a file, runs the file as Python runs a script, and calls the factory.

The file's folder comes first on ``sys.path``, so its neighbours import as they do for its owner; the file is not ``__main__``, so
a training loop under ``if __name__ == "__main__"`` stays where it is.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, Final, cast

from gpumemnet.errors import ExtractError
from gpumemnet.extract.faults import fault_sentence
from gpumemnet.layers import describe

if TYPE_CHECKING:
    from torch import nn

_MISSING: Final = object()


def split_source(source: str) -> tuple[Path, str]:
    """File and factory name of ``path/to/file.py:factory``.

    Raises:
        ExtractError: when the text has another form, or there is no such file.
    """
    path, colon, name = source.rpartition(":")
    if not colon or not path or not name.replace(".", "").isidentifier():
        raise ExtractError(f"{describe(source)} does not name a factory: write path/to/file.py:function")
    file = Path(path)
    if not file.is_file():
        raise ExtractError(f"there is no file {path}" if not file.exists() else f"{path} is no file")
    return file.resolve(), name


def compile_file(file: Path) -> CodeType:
    """The code of ``file``.

    Raises:
        ExtractError: when the file cannot be read or is no Python.
    """
    try:
        return compile(file.read_bytes(), str(file), "exec")
    except OSError as error:
        raise ExtractError(f"{file.name} cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise ExtractError(f"{file.name} is no valid Python: {fault_sentence(error)}") from error


def load_module(file: Path, code: CodeType) -> ModuleType:
    """Run the code of ``file`` as a module, registered under the file's stem where that name is free.

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


def call_factory(module: ModuleType, name: str, arguments: Mapping[str, Any]) -> tuple[nn.Module, object | None]:
    """The model that ``name`` in ``module`` builds, and the inputs that come with it, if any.

    Args:
        module: from :func:`load_module`.
        name: a function, a class or a ready model; dots lead into attributes.
        arguments: keyword arguments of the call.

    Raises:
        ExtractError: when there is no such name, the call raises, or what it returns is no model.
    """
    from torch import nn

    factory: Any = reduce(lambda value, part: getattr(value, part, _MISSING), name.split("."), cast(Any, module))
    where = Path(str(module.__file__)).name
    if factory is _MISSING:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f": did you mean '{close[0]}'?" if close else ""
        raise ExtractError(f"{where} has no '{name}'{hint}")
    if isinstance(factory, nn.Module):
        return factory, None
    if not callable(factory):
        raise ExtractError(f"'{name}' in {where} is {describe(factory)}, not a function that returns a model")
    try:
        built = factory(**arguments)
    except Exception as error:
        raise ExtractError(f"{name}() failed: {fault_sentence(error)}") from error
    model, inputs = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    if not isinstance(model, nn.Module):
        raise ExtractError(
            f"{name}() in {where} must return a torch.nn.Module or (model, inputs), and returned {_described(built)}"
        )
    return model, inputs


def _described(value: object) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: ({', '.join(type(entry).__name__ for entry in value)})"
    return "None" if value is None else describe(value)
