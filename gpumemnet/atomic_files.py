"""Atomic, durable writes of files, a lock between processes that write to one folder, and the JSON
documents of the package."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import resources
from itertools import repeat
from pathlib import Path
from types import UnionType
from typing import IO, Any, Final, get_args, get_origin, get_type_hints

from gpumemnet.errors import DatasetError, InvalidRequestError, first_line

MAX_STATED_BYTES: Final = 2**20
"""Largest document of a user that is read at once."""

STAGING_PREFIX: Final = ".staging-"
"""Prefix of unfinished files; a killed writer leaves them behind."""

_POLL_SECONDS: Final = 0.02
Document = dict[str, Any]
"""A JSON object."""


def read_file(path: Path, most_bytes: int) -> bytes:
    """The content of a file.

    Raises:
        OSError: when the file cannot be read, or is larger.
    """
    with path.open("rb") as stream:
        content = stream.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes} bytes")
    return content


def json_bytes(document: object) -> bytes:
    """A document as files hold it that people may read: indented JSON in UTF-8."""
    return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def replace_file(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` atomically: a reader sees the old file or the new one.

    Raises:
        OSError: when the file system refuses.
    """
    with replacing(path) as stream:
        stream.write(content)


def check_writable(path: Path, field: str = "out") -> None:
    """Checks that a file can be written, before its content is computed.

    Raises:
        InvalidRequestError: when the folder does not exist or may not be written to, or ``path`` is
            a folder.
    """
    folder = path.parent
    if not folder.is_dir():
        raise InvalidRequestError(f"the folder {folder} does not exist", field)
    if path.is_dir():
        raise InvalidRequestError(f"{path} is a folder", field)
    if not os.access(folder, os.W_OK):
        raise InvalidRequestError(f"the folder {folder} may not be written to", field)


def write_output(path: Path, content: bytes, field: str = "out") -> None:
    """Write the file that a user asked for in ``field``: a reader never sees part of it.

    Raises:
        InvalidRequestError: when the file cannot be written.
    """
    try:
        replace_file(path, content)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}", field) from None


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A stream to what replaces ``path`` atomically, once the block has ended without an error.

    Raises:
        OSError: when the file system refuses.
    """
    if path.exists() and not path.is_file():  # such as /dev/stdout, which nothing may replace
        with path.open("wb") as stream:
            yield stream
        return
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=STAGING_PREFIX, delete=False
    ) as stream:
        staging = Path(stream.name)
        try:
            yield stream
            stream.flush()
            os.fchmod(stream.fileno(), 0o644)
            os.fsync(stream.fileno())
            staging.replace(path)
        except BaseException:
            with suppress(OSError):
                staging.unlink()
            raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in ``folder`` to the disk; without this a power cut may undo a rename.

    Raises:
        OSError: when the file system refuses.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, timeout_seconds: float, busy: Exception) -> Iterator[None]:
    """Hold the lock ``path`` against other processes and threads; the system releases it when the
    holder dies.

    Raises:
        Exception: ``busy``, when another holds it for longer than ``timeout_seconds``.
        OSError: when the file cannot be made.
    """
    import fcntl  # POSIX only

    deadline = time.monotonic() + timeout_seconds
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise busy from None
                time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def no_room(where: Path | str) -> Iterator[None]:
    """Words the error for a location that cannot be written, of work that can be continued.

    Raises:
        DatasetError: when a write fails.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise DatasetError(
            f"{where} cannot be written ({reason}); what is finished is kept: make room, and the same command, run again, goes on"
        ) from None


def remove_staging(*folders: Path) -> None:
    """Remove what killed writers have left in ``folders``; nobody else may write there."""
    for folder in folders:
        for left in folder.glob(f"{STAGING_PREFIX}*"):
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()


def stated_json(path: Path, field: str) -> Any:
    """The JSON document in a user's file.

    Args:
        path: the file, of at most :data:`MAX_STATED_BYTES`.
        field: what it was given for, for errors.

    Raises:
        InvalidRequestError: the file cannot be read, is too large, or is no JSON.
    """
    try:
        return json.loads(read_file(path, MAX_STATED_BYTES))
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}", field) from None
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"{path} is no JSON file", field) from None


@cache
def shipped_json(name: str) -> Any:
    """A JSON document of the package, which is read once.

    Args:
        name: path of the file below ``gpumemnet``.
    """
    return json.loads(resources.files("gpumemnet").joinpath(name).read_text("utf-8"))


hints_of: Final = cache(get_type_hints)
"""The types of a class's fields, by name."""


def from_json(kind: Any, value: Any) -> Any:
    """The value of a type that :func:`dataclasses.asdict` has turned into JSON; members that are no
    fields are left out."""
    origin, arguments = get_origin(kind), get_args(kind)
    if hasattr(kind, "__dataclass_fields__"):
        kinds = hints_of(kind)
        return kind(
            **{name: from_json(kinds[name], value[name]) for name in kinds if name in value}
        )
    if origin is tuple:
        if isinstance(value, str):
            raise TypeError(f"{value!r} is no list")
        each = repeat(arguments[0]) if arguments[-1] is Ellipsis else arguments
        return tuple(map(from_json, each, value))
    if origin is UnionType and value is not None:
        return from_json(arguments[0], value)
    return value
