"""The files that a batch reads: paths, globs and object-store URLs, each with what tells one content from another."""

from __future__ import annotations

import glob
import importlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpumemnet.errors import InvalidRequestError

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
        size_bytes: its size.
        stamp: what changes when the content does: time of modification, or the store's own tag.
    """

    location: str
    format: str
    size_bytes: int
    stamp: str


def is_url(location: str) -> bool:
    """Whether ``location`` names a store, and not a file of this machine (``file://`` does name one)."""
    return _SCHEME in location and not location.startswith("file" + _SCHEME)


def local_path(location: str) -> Path:
    """The path of a file of this machine."""
    return Path(location.removeprefix("file" + _SCHEME))


def format_of(location: str, purpose: str) -> str:
    """The format by the suffix.

    Raises:
        InvalidRequestError: when it is none of those known.
    """
    suffix = os.path.splitext(location)[1].lower()  # noqa: PTH122 - a URL is no path
    if suffix not in FORMATS:
        raise InvalidRequestError(f"{location} must end in {', '.join(FORMATS)}", purpose)
    return FORMATS[suffix]


def find_inputs(patterns: Iterable[str]) -> list[InputFile]:
    """The files that paths, globs and URLs name, each once; those of a glob in the order of their names.

    Raises:
        InvalidRequestError: when there is nothing at one of them, a suffix is not known, or a package for a store is missing.
    """
    found: dict[str, InputFile] = {}
    for pattern in patterns:
        for location in _expanded(pattern):
            found.setdefault(location, _described(location))
    return list(found.values())


def open_input(location: str) -> Any:
    """The file, for reading bytes.

    Raises:
        OSError: when it cannot be read.
    """
    if is_url(location):
        system, path = store(location)
        return system.open(path, "rb")
    return local_path(location).open("rb", buffering=_BUFFER_BYTES)


def store(url: str) -> tuple[Any, str]:
    """The store that ``url`` names, as a file system of fsspec, and the path in it.

    Raises:
        InvalidRequestError: when nothing is known of its scheme, or a package is missing.
    """
    scheme = url.split(_SCHEME)[0]
    try:
        system, path = importlib.import_module("fsspec.core").url_to_fs(url)
    except ImportError as error:
        raise InvalidRequestError(
            f"{url}: stores need the package fsspec and the one for {scheme}, such as s3fs ({str(error)[:120]})", "jobs"
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
        names = sorted(map(str, _asked(pattern, lambda: system.glob(path))))
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
        facts = _asked(location, lambda: system.info(path))
        if facts.get("type") == "directory" or facts.get("size") is None:
            raise InvalidRequestError(f"{location} is no file", "jobs")
        stamp = next(
            (facts[name] for name in ("ETag", "etag", "md5Hash", "mtime", "LastModified", "created") if name in facts), ""
        )
        return InputFile(location, form, int(facts["size"]), str(stamp))
    file = Path(location)
    if not file.is_file():
        raise InvalidRequestError(f"{location} does not exist" if not file.exists() else f"{location} is no file", "jobs")
    state = file.stat()
    return InputFile(location, form, state.st_size, str(state.st_mtime_ns))


def _asked(location: str, ask: Any) -> Any:
    """What a store answers; the packages for stores raise errors of their own."""
    try:
        return ask()
    except FileNotFoundError:
        raise InvalidRequestError(f"{location} does not exist", "jobs") from None
    except Exception as error:
        raise InvalidRequestError(
            f"{location} cannot be reached ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]})", "jobs"
        ) from None
