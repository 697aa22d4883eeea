"""Finds the input files of a batch from paths, globs and object-store URLs, and describes each by
size and stamp."""

from __future__ import annotations

import glob
import importlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpumemnet.errors import InvalidRequestError, first_line

FORMATS: Final = {".parquet": "parquet", ".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
_WILD: Final = frozenset("*?[")
_SCHEME: Final = "://"
_BUFFER_BYTES: Final = 2**20


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of jobs.

    Attributes:
        location: path, or URL with its scheme.
        format: ``parquet``, ``csv`` or ``jsonl``.
        size_bytes: size of the file.
        stamp: a value that changes with the content: the modification time, or the store's tag.
    """

    location: str
    format: str
    size_bytes: int
    stamp: str


def is_url(location: str) -> bool:
    """Whether ``location`` is in a store; paths and ``file://`` URLs are not."""
    return _SCHEME in location and not location.startswith("file" + _SCHEME)


def local_path(location: str) -> Path:
    """The path of a local file, given as a path or as a ``file://`` URL."""
    return Path(location.removeprefix("file" + _SCHEME))


def format_of(location: str, purpose: str) -> str:
    """Determines the format from the suffix.

    Raises:
        InvalidRequestError: when the suffix is unknown.
    """
    suffix = os.path.splitext(location)[1].lower()  # noqa: PTH122 - a URL is no path
    if suffix not in FORMATS:
        raise InvalidRequestError(f"{location} must end in {', '.join(FORMATS)}", purpose)
    return FORMATS[suffix]


def find_inputs(patterns: Iterable[str]) -> list[InputFile]:
    """Finds the files that paths, globs and URLs match, each once; the matches of a glob are sorted
    by name.

    Raises:
        InvalidRequestError: when one of them matches nothing, a suffix is unknown, or a package for
            a store is missing.
    """
    found: dict[str, InputFile] = {}
    for pattern in patterns:
        for location in _expanded(pattern):
            found.setdefault(location, _described(location))
    return list(found.values())


def open_input(location: str) -> Any:
    """Opens the file for reading bytes.

    Raises:
        OSError: when the file cannot be read.
    """
    if is_url(location):
        system, path = store(location)
        return system.open(path, "rb")
    return local_path(location).open("rb", buffering=_BUFFER_BYTES)


def store(url: str) -> tuple[Any, str]:
    """Opens the store of ``url`` as an fsspec file system; returns it with the path inside it.

    Raises:
        InvalidRequestError: when the scheme is unknown, or a package is missing.
    """
    scheme = url.split(_SCHEME)[0]
    try:
        system, path = importlib.import_module("fsspec.core").url_to_fs(url)
    except ImportError as error:
        raise InvalidRequestError(
            f"{url}: stores need the package fsspec and the one for {scheme}, such as s3fs ({str(error)[:120]})",
            "jobs",
        ) from None
    except ValueError:
        raise InvalidRequestError(f"{url}: fsspec knows no store called {scheme}", "jobs") from None
    return system, path


def _expanded(pattern: str) -> list[str]:
    is_wild = not _WILD.isdisjoint(pattern)
    if is_url(pattern):
        if not is_wild:
            return [pattern]
        system, path = store(pattern)
        names = sorted(map(str, _from_store(pattern, lambda: system.glob(path))))
        found = [system.unstrip_protocol(name) for name in names]
    else:
        path = str(local_path(pattern))
        if not is_wild or Path(path).exists():  # a file may have a bracket in its name
            return [path]
        found = sorted(name for name in glob.glob(path, recursive=True) if Path(name).is_file())  # noqa: PTH207 - absolute globs
    if not found:
        raise InvalidRequestError(f"{pattern}: no file has such a name", "jobs")
    return found


def _described(location: str) -> InputFile:
    form = format_of(location, "jobs")
    if is_url(location):
        system, path = store(location)
        facts = _from_store(location, lambda: system.info(path))
        if facts.get("type") == "directory" or facts.get("size") is None:
            raise InvalidRequestError(f"{location} is no file", "jobs")
        stamp = next(
            (
                facts[name]
                for name in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created")
                if name in facts
            ),
            "",
        )
        return InputFile(location, form, int(facts["size"]), str(stamp))
    file = Path(location)
    if not file.is_file():
        raise InvalidRequestError(
            f"{location} does not exist" if not file.exists() else f"{location} is no file", "jobs"
        )
    state = file.stat()
    return InputFile(location, form, state.st_size, str(state.st_mtime_ns))


def _from_store(location: str, call: Any) -> Any:
    """Calls ``call`` and turns the exceptions of the stores' packages into
    :class:`~gpumemnet.errors.InvalidRequestError`."""
    try:
        return call()
    except FileNotFoundError:
        raise InvalidRequestError(f"{location} does not exist", "jobs") from None
    except Exception as error:
        raise InvalidRequestError(
            f"{location} cannot be reached ({type(error).__name__}: {first_line(error, 160)})",
            "jobs",
        ) from None
