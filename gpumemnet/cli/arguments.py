"""Options that several commands have, and the files and values that options name."""

from __future__ import annotations

import atexit
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.units import GIB, MIB

STANDARD_INPUT = "-"
AsJson = Annotated[bool, typer.Option("--json", help="For programs: print one JSON document.")]
GpuOption = Annotated[
    str | None,
    typer.Option(
        envvar="GPUMEMNET_GPU",
        help="GPU to answer for; that of the most trusted labels unless given.",
    ),
]
ContextOption = Annotated[
    int | None,
    typer.Option(
        envvar="GPUMEMNET_CONTEXT_MIB",
        metavar="MIB",
        min=1,
        help="The CUDA context where you know yours; else the catalogue's.",
    ),
]


def input_file(path: Path, endings: tuple[str, str] = (".json", ".jsonl")) -> Path:
    """Returns ``path``; for ``-``, a temporary file with the content of standard input.

    Args:
        path: the path that the user gave.
        endings: suffix of a file with one JSON document, and of a file with one JSON document per
            line.
    """
    if str(path) != STANDARD_INPUT:
        return path
    content = sys.stdin.buffer.read()
    folder = tempfile.mkdtemp(prefix="gpumemnet-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    copy = Path(folder) / f"standard_input{endings[_is_json_lines(content)]}"
    copy.write_bytes(content)
    return copy


def _is_json_lines(content: bytes) -> bool:
    """Whether the first line is a complete JSON document and other lines follow."""
    first, _, rest = content.strip().partition(b"\n")
    try:
        json.loads(first)
    except ValueError:
        return False
    return bool(rest)


def factory_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """Parses keyword arguments from ``name=value`` strings; a value that is not JSON stays a
    string.

    Raises:
        InvalidRequestError: when a string has another form or a name appears twice.
    """
    arguments: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise InvalidRequestError(f"must look like depth=12, not {describe(text)}", "arg")
        if name in arguments:
            raise InvalidRequestError(f"'{name}' is given twice", "arg")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments


_UNITS: Final = {"gib": GIB, "mib": MIB}
_LARGEST_AMOUNT: Final = 2**20


def parse_memory(text: str, field: str) -> int:
    """Parses an amount of memory such as ``20GiB`` or ``20480 MiB``; returns bytes.

    Raises:
        InvalidRequestError: when it has another form, or is not above zero.
    """
    number, unit = text.strip()[:-3].strip(), text.strip()[-3:].lower()
    try:
        amount = float(number)
    except ValueError:
        amount = 0.0
    if unit not in _UNITS or not 0 < amount < _LARGEST_AMOUNT:
        raise InvalidRequestError(
            f"must be an amount of memory such as 20GiB or 20480MiB, not {describe(text)}", field
        )
    return int(amount * _UNITS[unit])
