"""Which code is the user's own, and which is a library's or this project's.

:func:`fault_sentence` describes an error in a user's code in one sentence, with the innermost line
of their code.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from functools import cache
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import gpumemnet

_MAX_TEXT: Final = 300
_MOST_CALLS: Final = 6
_LEADS_TO: Final = " → "
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
"""Names of folders of installed packages, also of another environment."""

_OWN_REFERENCES: Final = 3
"""To such a dictionary: the frame's, that of the function here, and its argument's."""


class UnknownValueError(RuntimeError):
    """The code needs the value, not the shape, of a tensor that was never computed.

    Attributes:
        operator: name of the operator that needs it.
        reason: why it needs it.
    """

    def __init__(self, operator: str, reason: str) -> None:
        super().__init__(f"{operator} {reason}")
        self.operator = operator
        self.reason = reason


def fault_sentence(error: BaseException) -> str:
    """Return ``error`` as ``file.py line 12, in forward: ValueError: its first words``.

    An error that was raised from another begins with the other, because that is the cause.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{_short_path(error.filename)} line {error.lineno}: {type(error).__name__}: {error.msg}"
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    what = (
        _described(root)
        if root is error
        else f"{_described(root)}; this led to {_described(error)}"
    )
    where = user_location(error) or _library_location(error)
    return f"{where}: {what}" if where else what


def _described(error: BaseException) -> str:
    """Return class and first words of an error; of one in a data loader's process the error
    there."""
    lines = str(error).strip().splitlines()
    if any(line.startswith("Original Traceback") for line in lines):
        return f"{lines[-1]} ({lines[0].rstrip('.')})"
    text = " ".join(" ".join(lines).split())
    if len(text) > _MAX_TEXT:
        text = text[: _MAX_TEXT - 1] + "…"
    name = type(error).__name__
    return text if isinstance(error, UnknownValueError) else f"{name}: {text}" if text else name


def _library_location(error: BaseException) -> str:
    """Return ``transformers/cache_utils.py line 12, in update`` where only installed packages but
    PyTorch ran; else nothing."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        package = _in_package(frame.f_code.co_filename)
        if package is not None and package.parts[0] not in ("torch", "gpumemnet"):
            return f"{package} line {line}, in {frame.f_code.co_name}"
    return ""


@cache
def _in_package(filename: str) -> Path | None:
    """Return the path of an installed package's file from where packages are installed."""
    file = Path(filename)
    for kind in ("purelib", "platlib"):
        folder = Path(sysconfig.get_paths()[kind])
        if file.is_relative_to(folder):
            return file.relative_to(folder)
    return None


def user_location(error: BaseException) -> str:
    """Return ``file.py line 12, in forward`` for the innermost frame of the user's code; empty if
    there is none."""
    return user_calls(error).rpartition(_LEADS_TO)[2]


def user_calls(error: BaseException) -> str:
    """Return the calls of the user's code that led to ``error``, the innermost last, each as
    :func:`user_location` gives it; empty if there are none."""
    frames = traceback.walk_tb(error.__traceback__)
    places = [
        place_text(frame.f_code, line)
        for frame, line in frames
        if is_user_code(frame.f_code.co_filename)
    ]
    return _LEADS_TO.join(places[-_MOST_CALLS:])


def running_line() -> str:
    """Return the location of the user's code that runs now, as :func:`user_location` does."""
    frame = running_frame(_is_library)
    return "" if frame is None else place_text(frame.f_code, frame.f_lineno)


def running_frame(passes: Callable[[str], bool]) -> FrameType | None:
    """Return the innermost frame that runs now, but for those whose file ``passes`` passes over."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return next((frame for frame in frames if not passes(frame.f_code.co_filename)), None)


def definition(function: object) -> str:
    """Return `` (file.py line 12)`` for a function of the user's code; empty for others."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType) or _is_library(code.co_filename):
        return ""
    return f" ({_short_path(code.co_filename)} line {code.co_firstlineno})"


def place_text(code: CodeType, line: int) -> str:
    """Return ``file.py line 12, in forward``; the file of an installed package begins with the
    package's name."""
    return _place_text(code, line, Path.cwd())


@cache
def _place_text(code: CodeType, line: int, folder: Path) -> str:
    function = "" if code.co_name == "<module>" else f", in {code.co_name}"
    return f"{_short_path(code.co_filename)} line {line}{function}"


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a frame.

    Before Python 3.13, the frame of a function keeps the dictionary that it gives until it ends, and
    so what it holds: it is emptied, unless the code has it, too, from ``locals()``.
    """
    given = frame.f_locals
    found = {**given}
    is_copy = frame.f_code.co_flags & CO_OPTIMIZED and type(given) is dict
    if is_copy and sys.getrefcount(given) <= _OWN_REFERENCES:
        given.clear()
    return found


def is_user_code(filename: str) -> bool:
    """Whether a file is the user's own: not of Python, of an installed package or of this
    project."""
    return not _is_library(filename)


def _is_library(filename: str) -> bool:
    return _lies_in(filename, _library_folders("torch" in sys.modules))


@cache
def _library_folders(with_torch: bool) -> frozenset[str]:
    paths = sysconfig.get_paths()
    folders = {
        paths["stdlib"],
        paths["platstdlib"],
        paths["purelib"],
        paths["platlib"],
        *gpumemnet.__path__,
    }
    return frozenset(folders | set(sys.modules["torch"].__path__) if with_torch else folders)


@cache
def _lies_in(filename: str, folders: frozenset[str]) -> bool:
    if filename.startswith(("<", *(f"{folder}{os.sep}" for folder in folders))):
        return True
    path = Path(filename)
    return not _INSTALLED.isdisjoint(path.parts) or any(map(_holds_packages, path.parents))


@cache
def _holds_packages(folder: Path) -> bool:
    """Whether packages are installed in a folder, as ``pip install --target`` does, and it is not
    the script's own."""
    return not Path.cwd().is_relative_to(folder) and any(folder.glob("*.dist-info"))


def _short_path(filename: str) -> str:
    path = Path(filename)
    package = _in_package(filename)
    if package is not None:
        return str(package)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename


def checkout_folder() -> Path | None:
    """The root of the checkout that ``gpumemnet`` is imported from; ``None`` where it is installed.

    A checkout keeps ``service``, ``models`` and ``dataset_builder`` beside ``gpumemnet``; a wheel
    installs them inside of it, so that nothing with a general name lands in ``site-packages``.
    """
    package = Path(gpumemnet.__path__[0]).resolve()
    return None if (package / "service").is_dir() else package.parent
