"""Says in one sentence what went wrong in a user's code, and where: the innermost line that is theirs, not a library's."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Final

import gpumemnet

_MAX_TEXT: Final = 300


class UnknownValueError(RuntimeError):
    """The code needs the value, not the shape, of a tensor that was never computed.

    Attributes:
        operator: name of the operator that needs it.
        reason: what it needs.
    """

    def __init__(self, operator: str, reason: str) -> None:
        super().__init__(f"{operator} {reason}")
        self.operator = operator
        self.reason = reason


def fault_sentence(error: BaseException) -> str:
    """``error`` as ``file.py line 12, in forward: ValueError: its first words``."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{_short_path(error.filename)} line {error.lineno}: {type(error).__name__}: {error.msg}"
    text = " ".join(str(error).split())
    if len(text) > _MAX_TEXT:
        text = text[: _MAX_TEXT - 1] + "…"
    name = type(error).__name__
    what = text if isinstance(error, UnknownValueError) else f"{name}: {text}" if text else name
    where = user_location(error)
    return f"{where}: {what}" if where else what


def user_location(error: BaseException) -> str:
    """``file.py line 12, in forward`` for the innermost frame of the user's code, or an empty text."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not _is_library(frame.filename):
            function = "" if frame.name == "<module>" else f", in {frame.name}"
            return f"{_short_path(frame.filename)} line {frame.lineno}{function}"
    return ""


def _is_library(filename: str) -> bool:
    paths = sysconfig.get_paths()
    folders = {paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], *gpumemnet.__path__}
    if (torch := sys.modules.get("torch")) is not None:
        folders |= set(torch.__path__)
    return filename.startswith("<") or any(Path(filename).is_relative_to(folder) for folder in folders)


def _short_path(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
