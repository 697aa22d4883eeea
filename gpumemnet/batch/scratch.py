"""Keeps the finished parts of a batch in a hidden folder until all are complete, so that a killed
run can resume.

The folder's name contains a hash of everything that the answers depend on: the state of the inputs,
the models and the options. The tally of a part is written last; a part with a tally is finished.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Final

from gpumemnet.atomic_files import locked, replace_file
from gpumemnet.batch.answers import Rejected
from gpumemnet.batch.options import BatchOptions, Names
from gpumemnet.batch.plan import PART_ROWS, Part
from gpumemnet.errors import DatasetError, InvalidRequestError, first_line
from gpumemnet.job.job_files import JobFile
from gpumemnet.job.reader import CHUNK_ROWS

_VERSION: Final = 1
"""Version of the file format of parts; increase it when the format changes."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of a part, or of a batch.

    Attributes:
        rows: processed rows or lines.
        answered: jobs with an answer.
        outside: answered jobs outside the models' support.
        rejected: rows without an answer.
    """

    rows: int = 0
    answered: int = 0
    outside: int = 0
    rejected: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.rows + other.rows,
            self.answered + other.answered,
            self.outside + other.outside,
            self.rejected + other.rejected,
        )


def batch_key(
    inputs: Iterable[JobFile], names: Names, options: BatchOptions, output_format: str
) -> str:
    """Hash of everything that the answers of a batch depend on; an input counts with its location,
    format, size and stamp."""
    facts = {
        "form": (_VERSION, CHUNK_ROWS, PART_ROWS, output_format),
        "versions": [version(name) for name in ("gpumemnet", "numpy", "onnxruntime", "pyarrow")],
        "inputs": [asdict(file) for file in inputs],
        "models": names.hashes,
        "gpu": names.gpu,
        "options": asdict(options) | {"bundles": None},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


class Scratch:
    """The hidden folder of one batch."""

    def __init__(self, folder: Path, output_format: str) -> None:
        self.folder = folder
        self._suffix = "arrow" if output_format == "parquet" else output_format

    def answers(self, part: Part) -> Path:
        """File of a part's answers, in Arrow's file format or as lines of CSV or JSON."""
        return self.folder / f"{part.name}.{self._suffix}"

    def rejected(self, part: Part) -> Path:
        """File of a part's rejected rows; it exists only if there are any."""
        return self.folder / f"{part.name}.rejected.jsonl"

    def tally(self, part: Part) -> Tally | None:
        """The counts of a part; ``None`` if the part is not finished."""
        try:
            return Tally(**json.loads(self._marker(part).read_bytes()))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def keep(
        self,
        part: Part,
        write: Callable[[IO[bytes]], object],
        rejected: Iterable[Rejected],
        location: str,
        tally: Tally,
    ) -> None:
        """Stores the answers, the rejected rows and the counts of a part.

        Raises:
            DatasetError: when a file cannot be written.
        """
        try:
            self._write(self.answers(part), write)
            lines = [
                json.dumps({"input": location, **row._asdict()}, ensure_ascii=False).encode()
                + b"\n"
                for row in rejected
            ]
            if lines:
                self._write(self.rejected(part), lambda stream: stream.writelines(lines))
            replace_file(self._marker(part), json.dumps(asdict(tally)).encode())
        except OSError as error:
            raise no_room(self.folder, error) from None

    def clear_partial(self) -> None:
        """Removes unfinished files of a killed run."""
        for path in (*self.folder.glob("*.partial"), *self.folder.glob(".staging-*")):
            with suppress(OSError):
                path.unlink()

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _marker(self, part: Part) -> Path:
        return self.folder / f"{part.name}.json"

    @staticmethod
    def _write(path: Path, write: Callable[[IO[bytes]], object]) -> None:
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as stream:
                write(stream)
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise


@contextmanager
def scratch_of(folder: Path, name: str, key: str, output_format: str) -> Iterator[Scratch]:
    """Opens and locks the scratch folder in ``folder`` of the output ``name``; removes those of
    other batches with that output.

    Raises:
        InvalidRequestError: when another run writes the same output.
        DatasetError: when the folder cannot be created.
    """
    lock = folder / f".{name}.lock"
    own = folder / f".{name}.parts-{key}"
    with ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(lock, 0.0))
            for other in folder.glob(f".{glob.escape(name)}.parts-*"):
                if other != own:
                    shutil.rmtree(other, ignore_errors=True)
            own.mkdir(exist_ok=True)
        except TimeoutError:
            raise InvalidRequestError(
                f"another run is writing {name} in {folder}: wait for it, or choose another file",
                "out",
            ) from None
        except OSError as error:
            raise no_room(folder, error) from None
        scratch = Scratch(own, output_format)
        scratch.clear_partial()
        yield scratch
        with suppress(OSError):
            lock.unlink()


def no_room(where: Path | str, error: OSError) -> DatasetError:
    """The error for a location that cannot be written."""
    reason = error.strerror or first_line(error)
    return DatasetError(
        f"{where} cannot be written ({reason}); finished parts are kept: the same command, run again, goes on"
    )
