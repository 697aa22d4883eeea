"""Files that a script saves and loads again while it is traced.

Weights have no values in a trace.  ``torch.save`` and ``safetensors.torch.save_file`` still write
files of the right size that every program can read, with zeros for the missing values; large ones
are sparse.  What is saved once tensors are on the GPU ends with the trace: it is removed, and what
it replaced is put back, also where the script renamed or copied it; so are other files that it
writes over, adds to, removes or renames, such as a checkpoint of an earlier run.  A folder that it
makes for less than 1 MiB of its own files is removed: a run may refuse to begin where its folder is
there.  What is saved before, such as a preprocessed dataset, has its real values and stays, unless it
lies in such a folder, or where a file of the user's was that the script has removed or renamed.

A checkpoint that the same run has saved is loaded from memory, as ``torch.load`` would: on the
device that it was saved from, or on that of ``map_location``.
"""

from __future__ import annotations

import builtins
import copy
import importlib.util
import json
import os
import pickle
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor, nn
from torch.serialization import skip_data

from gpumemnet.extract.known_layouts import meta_like
from gpumemnet.sandbox.checkpoint import is_own_process, leave, started, was_left
from gpumemnet.torch_private.names import (
    Function,
    replaced,
    value_of,
    without_function_modes,
)
from gpumemnet.torch_private.script import (
    FAKE_TENSORS,
    SAFETENSORS_SAVE,
    SAFETENSORS_TYPES,
    unseen,
)
from gpumemnet.tracing.script.simulated_cuda import GPU
from gpumemnet.units import MIB

_ON_HOST: Final = SimpleNamespace(cuda=lambda *device, **options: GPU, cpu=lambda: None)
"""A storage, as a function of ``map_location`` sees it."""


def goes_to_gpu(map_location: Any, location: str) -> bool:
    """Whether ``torch.load`` puts a storage on the GPU that was saved from ``location``."""
    if isinstance(map_location, Mapping):
        location = map_location.get(location, location)
    elif callable(map_location):
        return bool(map_location(_ON_HOST, location) == GPU)
    elif map_location is not None:
        location = map_location
    return torch.device(location).type == GPU.type


_MAX_BUFFER_BYTES: Final = 2**31
"""Largest file that is written to memory, where zeros take room."""
_CHUNK_BYTES: Final = 2**20


class SavedFiles:
    """What a script saved, by file, and the files on disk that hold zeros in place of values.

    Args:
        device_of: returns the device of a tensor as the script sees it.
        has_values: whether the values of a tensor are real.
        is_gpu_used: whether anything is on the GPU yet.
        note: called with a sentence for the answer.
    """

    def __init__(
        self,
        device_of: Callable[[Tensor], torch.device],
        has_values: Callable[[Tensor], bool],
        is_gpu_used: Callable[[], bool],
        note: Callable[[str], None],
    ) -> None:
        self._device_of = device_of
        self._has_values = has_values
        self._is_gpu_used = is_gpu_used
        self._note = note
        self._saved: dict[object, tuple[object, set[int]]] = {}
        self._temporary: set[Path] = set()
        self._opened: set[Any] = set()
        self._backups: list[tuple[Path, Path]] = []
        self._is_there: dict[Path, bool] = {}
        self._overwritten: set[Path] = set()
        self._folders: list[Path] = []
        self._links: list[Path] = []
        self._open, self._rename, self._write = builtins.open, os.rename, torch.save

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which the script's files are watched; temporary ones are undone at its end."""

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("opener"):  # of tempfile: it makes the file, by a number
                return self._open(file, mode, *args, **kwargs)
            letters = set(mode if isinstance(mode, str) else "")
            if "b" in letters and letters & set("wx"):
                self._back_up(file)
                self._opened.add(_path(file))
                if self._is_gpu_used() and isinstance(_path(file), Path):
                    self._temporary.add(_path(file))
            elif letters & set("wax+"):
                self._keep_copy(file, "x" in letters)
            return self._open(file, mode, *args, **kwargs)

        def opened_by_number(file: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            folder = kwargs.get("dir_fd")
            if flags & os.O_CREAT:
                # tempfile follows no link, and others make exclusive files for others to find.
                is_exclusive = bool(flags & os.O_EXCL) and not flags & os.O_NOFOLLOW
                place = Path() if folder is None else Path(f"/proc/self/fd/{folder}").readlink()
                self._keep_copy(place / os.fsdecode(file), is_exclusive)
            number: int = open_number(file, flags, *args, **kwargs)
            return number

        def renamed(source: Any, target: Any, **kwargs: Any) -> None:
            old, new = _place(source), _place(target)
            is_users = old != new and is_own_process() and self._is_users(old)
            if is_users:
                self._back_up(target)
            self._follows(source, target)
            self._rename(source, target, **kwargs)
            self._moved(source, target)
            if is_users:
                self._temporary.discard(new)
                self._opened.discard(new)
                self._keep(old, new)

        def following(copy: Function) -> Function:
            def copied(source: Any, target: Any, **kwargs: Any) -> Any:
                self._follows(source, target)
                result = copy(source, target, **kwargs)
                self._moved(source, target, is_copy=True)
                return result

            return copied

        def made(folder: Any, *args: Any, **kwargs: Any) -> None:
            path = _path(folder)
            try:
                make(folder, *args, **kwargs)
            except FileExistsError:  # another way has left it: it crashed, or others wrote there
                if path in self._folders or not was_left(path):
                    raise
            self._folders.append(path)
            leave(path)

        def setting_aside(remove: Callable[..., None]) -> Callable[..., None]:
            def removed(path: Any, *args: Any, **kwargs: Any) -> None:
                if kwargs.get("dir_fd") is not None or not self._set_aside(path):
                    remove(path, *args, **kwargs)

            return removed

        def linked(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
            link(source, target, *args, **kwargs)
            self._links.append(Path(os.fsdecode(target)).absolute())

        make, link, open_number = os.mkdir, os.symlink, os.open
        with ExitStack() as stack:
            stack.callback(self._undo)
            stack.enter_context(
                replaced(
                    [
                        ("os:mkdir", made),
                        ("os:symlink", linked),
                        ("os:open", opened_by_number),  # as Path.touch and tempfile do
                        ("builtins:open", opened),
                        ("io:open", opened),
                        # Of the same type as ``open``: some scripts replace it only if it is.
                        (
                            "builtins:print",
                            lambda *args, write=print, **kwargs: write(*args, **kwargs),
                        ),
                        ("os:rename", renamed),
                        ("os:replace", renamed),
                        ("shutil:copyfile", following(shutil.copyfile)),
                        ("os:link", following(os.link)),
                        ("os:remove", setting_aside(os.remove)),
                        ("os:unlink", setting_aside(os.unlink)),
                        ("shutil:rmtree", setting_aside(shutil.rmtree)),
                    ]
                )
            )
            stack.enter_context(self._saving_safetensors())
            yield

    def save(self, value: object, file: Any) -> None:
        """Write ``value`` as ``torch.save`` would, and keep a copy for :meth:`load`.

        Where the file cannot be written, a note says why, and the script goes on: a trace often
        runs on a machine without the folders of the cluster.
        """
        key = _key(file)
        # Some things cannot be copied; nothing loads most of them.
        with suppress(TypeError, RuntimeError, AttributeError):
            self._saved[key] = self._kept(value)
        try:
            with unseen():
                self._save(value, file)
        except Exception as error:  # pickling runs code of the script's classes
            self._note(
                f"torch.save wrote nothing to {file}: {getattr(error, 'strerror', None) or error}"
            )

    def has(self, file: Any) -> bool:
        """Whether the script has saved ``file`` in this run."""
        return _key(file) in self._saved

    def load(self, file: Any, map_location: object = None) -> object:
        """Return what was saved, on the device that it was saved from or on ``map_location``."""
        value, on_gpu = self._saved[_key(file)]

        def loaded(tensor: Tensor) -> Tensor:
            if goes_to_gpu(map_location, str(GPU) if id(tensor) in on_gpu else "cpu"):
                return _like(tensor, tensor.detach().to(GPU))
            with without_function_modes():
                return _like(tensor, _on_host(tensor))

        return _copied(value, loaded)

    def _kept(self, value: object) -> tuple[object, set[int]]:
        """A copy of ``value`` with its tensors on the host, and which of these were on the GPU."""
        on_gpu: set[int] = set()

        def kept(tensor: Tensor) -> Tensor:
            is_on_gpu = self._device_of(tensor) == GPU
            with without_function_modes(), unseen():  # a file, and no memory of the script
                copied = _like(tensor, _on_host(tensor))
            if is_on_gpu:
                on_gpu.add(id(copied))
            return copied

        return _copied(value, kept), on_gpu

    def _save(self, value: object, file: Any) -> None:
        path = _path(file)
        is_path = isinstance(path, Path)
        is_real = all(self._has_values(tensor) for tensor in _tensors(value))
        if is_real and not self._is_gpu_used():
            self._write(value, file)
            return
        if is_path and (path.is_char_device() or path.is_fifo()):
            return  # such as /dev/null, which another file would take the place of
        folder = path.parent if is_path else None
        handle, name = tempfile.mkstemp(".tmp", ".torch-save-", folder)
        os.close(handle)
        scratch = Path(name)
        try:
            if is_real:
                self._write(value, scratch)
            else:
                with skip_data(materialize_fake_tensors=True):
                    self._write(_copied(value, _fake), scratch)
            if is_path:
                self._back_up(path)
                self._rename(scratch, path)
                self._ends_with_trace(path)
            else:
                self._copy_to(file, scratch)
        finally:
            scratch.unlink(missing_ok=True)

    def _copy_to(self, file: BinaryIO, source: Path) -> None:
        """Copy a sparse file to one that the script has opened, or to a buffer."""
        path = _key(file)
        is_on_disk = isinstance(path, Path)
        size = source.stat().st_size
        if not is_on_disk and size > _MAX_BUFFER_BYTES:
            raise OSError(f"{size:,} bytes are too many for a buffer in memory")
        with self._open(source, "rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                if is_on_disk and not any(chunk):
                    file.seek(len(chunk), os.SEEK_CUR)
                else:
                    file.write(chunk)
        if is_on_disk:
            file.truncate()
            self._ends_with_trace(path)

    @contextmanager
    def _saving_safetensors(self) -> Iterator[None]:
        if importlib.util.find_spec("safetensors") is None:
            yield
            return
        write = value_of(SAFETENSORS_SAVE)

        def save_file(tensors: Mapping[str, Tensor], filename: Any, metadata: Any = None) -> None:
            target = _path(filename)
            with without_function_modes():
                is_real = all(self._has_values(tensor) for tensor in tensors.values())
            if self._is_gpu_used() or not is_real:
                self._back_up(target)
                self._ends_with_trace(target)
            if is_real:
                write(tensors, filename, metadata)
            else:
                _write_safetensors_of_zeros(tensors, target, metadata)

        with replaced([(SAFETENSORS_SAVE, save_file)]):
            yield

    def _ends_with_trace(self, path: Path) -> None:
        self._temporary.add(path)
        self._note(
            "files that the script saved were removed after the trace: they held zeros in place of weights"
        )

    def _back_up(self, file: Any) -> None:
        """Set aside a file of the user's that is about to be replaced."""
        path = _path(file)
        if not isinstance(path, Path) or not is_own_process():
            return
        if path in self._temporary:
            path.unlink(missing_ok=True)
        elif path in self._opened:
            return  # it is the script's own
        elif self._is_first(path):
            backup = self._backup_of(path)
            self._rename(path, backup)
            if path not in self._is_there:
                self._overwritten.add(backup)
            self._keep(path, backup)

    def _keep_copy(self, file: Any, is_exclusive: bool = False) -> None:
        """Copy a file of the user's, such as a table of results, that is about to be written to;
        it is put back."""
        path = _path(file)
        if not isinstance(path, Path) or not is_own_process() or path in self._opened:
            return
        if not path.is_file():
            self._opened.add(path)  # it is the script's own
            if self._is_gpu_used() or is_exclusive:  # a run would go on with it, or fail
                self._temporary.add(path)
        elif self._is_gpu_used() and self._is_first(path):
            backup = self._backup_of(path)
            shutil.copy2(path, backup)
            self._temporary.discard(backup)
            self._keep(path, backup)
            self._temporary.add(path)
            self._note("files that the script wrote over or added to were put back after the trace")

    def _set_aside(self, file: Any) -> bool:
        """Set aside what is about to be removed; return whether it was, as it was there before the
        trace."""
        if not isinstance(_path(file), Path) or not is_own_process():
            return False
        path = _place(file)
        is_users = self._is_users(path)
        if path.is_dir() and not path.is_symlink():
            is_users = {*self._folders}.isdisjoint((path, *path.parents))
        if not is_users or not os.access(path.parent, os.W_OK):
            return False
        backup = self._backup_of(path)
        self._rename(path, backup)
        self._moved(path, backup)
        self._keep(path, backup)
        self._note("files that the script removed were put back after the trace")
        return True

    def _is_first(self, path: Path) -> bool:
        """Whether what is replaced is not yet kept, and can be."""
        is_left = self._is_there.get(path, True)
        return is_left and path.is_file() and os.access(path.parent, os.W_OK)

    def _is_users(self, path: Path) -> bool:
        if path in self._temporary or not os.path.lexists(path):
            return False
        return path.lstat().st_ctime < started() or self._is_there.get(path, False)

    def _keep(self, path: Path, place: Path) -> None:
        """Remember where something of the user's is now."""
        self._backups.append((path, place))
        self._is_there |= {path: False, place: True}

    def _backup_of(self, path: Path) -> Path:
        sys.audit("os.rename")  # a checkpoint is reached before, not amid a copy
        return path.with_name(f".{path.name}.before-trace-{os.getpid()}-{len(self._backups)}")

    def _follows(self, source: Any, target: Any) -> None:
        if _path(source) in self._temporary:
            self._back_up(target)

    def _moved(self, source: Any, target: Any, is_copy: bool = False) -> None:
        """Follow a file, or the files of a folder, to their new name."""
        old, new = _path(source), _path(target)
        if not isinstance(old, Path):
            return

        def follow(paths: Iterable[Any]) -> list[Path]:
            known = (each for each in paths if isinstance(each, Path))
            return [new / each.relative_to(old) for each in known if old in (each, *each.parents)]

        self._opened.update(follow(self._opened))
        self._folders += follow(self._folders)
        for path in [*self._temporary, *(key for key in self._saved if isinstance(key, Path))]:
            if path == old or old in path.parents:
                moved = new / path.relative_to(old)
                if path in self._temporary:
                    self._temporary.add(moved)
                if path in self._saved:
                    self._saved[moved] = self._saved[path]
                if not is_copy:
                    self._temporary.discard(path)
                    self._saved.pop(path, None)

    def _undo(self) -> None:
        """Remove the temporary files, and put back what they replaced and what was moved."""
        # A deadline, or a data loader whose workers end, would raise amid it, whichever thread the
        # signal reaches.
        handlers = [
            (number, signal.signal(number, lambda *args: None))
            for number in (signal.SIGALRM, signal.SIGCHLD)
        ]
        try:
            self._undo_files()
        finally:
            for number, handler in handlers:
                signal.signal(number, handler or signal.SIG_DFL)

    def _undo_files(self) -> None:
        for path in filter(Path.is_file, self._temporary):
            path.unlink()
        for path, backup in reversed(self._backups):
            if not os.path.lexists(backup):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):  # the others are still put back
                if path.is_file() and backup in self._overwritten:
                    shutil.copymode(backup, path)
                    backup.unlink()
                else:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._rename(backup, path)
        own = {each.parent for each in (*self._opened, *self._temporary) if isinstance(each, Path)}
        emptied = []
        for folder in self._folders:
            files = [*filter(Path.is_file, folder.rglob("*"))] if folder.is_dir() else []
            was_there = not self._is_there.keys().isdisjoint((folder, *folder.parents))
            if was_there or sum(path.stat().st_size for path in files) >= MIB:
                continue
            # Beside a file of the script, what is new is a library's; elsewhere, another training's.
            for path in files:
                is_new = path.parent in own and path.stat().st_mtime >= started()
                if path in self._opened or is_new:
                    path.unlink(missing_ok=True)
            emptied += [folder, *filter(Path.is_dir, folder.rglob("*"))]
        for path in filter(Path.is_symlink, self._links):
            if not path.exists():
                path.unlink()
        for path in sorted(emptied, reverse=True):
            with suppress(OSError):  # it is not empty
                path.rmdir()


def _write_safetensors_of_zeros(tensors: Mapping[str, Tensor], target: Path, metadata: Any) -> None:
    """Write a sparse file in the format of safetensors: the header's length, header, data."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    names = {dtype: name for name, dtype in value_of(SAFETENSORS_TYPES).items()}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + prod(tensor.shape) * tensor.element_size()
        kind = names[tensor.dtype]
        shape = list(tensor.shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with target.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def _path(file: Any) -> Any:
    if isinstance(file, str | bytes | os.PathLike):
        return Path(os.fsdecode(file)).resolve()
    return file


def _place(file: Any) -> Path:
    """Where a file is that is moved or removed: that of a link, not of what it links to."""
    path = Path(os.fsdecode(file))
    return path.parent.resolve() / path.name


def _key(file: Any) -> Any:
    found = _path(file)
    name = getattr(file, "name", None)
    return found if isinstance(found, Path) or not isinstance(name, str) else _path(name)


def _fake(tensor: Tensor) -> Tensor:
    """A tensor on the host with the shape of ``tensor`` that takes no memory."""
    size, stride, dtype = tensor.size(), tensor.stride(), tensor.dtype
    with value_of(FAKE_TENSORS)():
        return _like(tensor, torch.empty_strided(size, stride, dtype=dtype))


def _on_host(tensor: Tensor) -> Tensor:
    return meta_like(tensor) if tensor.is_meta else tensor.detach().to("cpu", copy=True)


def _like(tensor: Tensor, copied: Tensor) -> Tensor:
    return (
        nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied
    )


def _copied(value: object, place: Callable[[Tensor], Tensor]) -> object:
    """Return a copy of ``value`` with ``place(tensor)`` for each of its tensors."""
    tensors = {id(each): each for each in _tensors(value)}
    return copy.deepcopy(value, {key: place(tensor) for key, tensor in tensors.items()})


def _tensors(value: object) -> list[Tensor]:
    """The tensors that pickling ``value`` comes to: those of whole optimizers and trainers, too."""
    found: list[Tensor] = []

    class Finder(pickle.Pickler):
        def persistent_id(self, each: object) -> bool | None:
            if isinstance(each, Tensor):
                found.append(each)
            # To be pickled, a storage is saved by torch.save.
            return True if isinstance(each, Tensor) or torch.is_storage(each) else None

    with suppress(Exception):  # it runs code of the script's classes
        Finder(SimpleNamespace(write=len)).dump(value)
    return found
