"""Keeps the finished parts of a batch, and joins them, in order, into the output file.

Until all parts are complete they lie in a hidden folder, so that a killed run can resume.  The
folder's name contains a hash of everything that the answers depend on: the state of the inputs, the
models and the options.  A finished part has a file of its counts, which is written last.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

from gpumemnet.atomic_files import (
    STAGING_PREFIX,
    check_writable,
    locked,
    no_room,
    remove_staging,
    replace_file,
    sync_folder,
)
from gpumemnet.batch.part_predictions import Answers, BatchOptions, answer_schema, encode
from gpumemnet.batch.parts import PART_ROWS, Part
from gpumemnet.errors import DatasetError, InvalidRequestError
from gpumemnet.job.job_files import JobFile, is_url, local_path
from gpumemnet.job.table_reader import CHUNK_ROWS

_VERSION: Final = 3
"""Version of the form of parts; increase it when the form changes."""


class Tally(NamedTuple):
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


@dataclass(frozen=True)
class PartFiles:
    """The folder of a batch's finished parts.

    Raises (all methods):
        DatasetError: when a file cannot be written.
    """

    folder: Path
    output_format: str

    def finished(self) -> dict[str, Tally]:
        """Name → counts of each finished part."""
        counts = self.folder.glob("*.counts.json")
        return {path.name.split(".")[0]: Tally(**json.loads(path.read_bytes())) for path in counts}

    def keep(self, part: Part, answers: Answers) -> Tally:
        """Stores the answers and the rejected rows of a part; then its counts."""
        tally = Tally(
            part.row_count,
            sum(map(len, answers.batches)),
            sum(len(each) - each.column("in_support").true_count for each in answers.batches),
            len(answers.rejected),
        )
        with no_room(self.folder):
            replace_file(self.answers(part), encode(answers.batches, self.output_format))
            if answers.rejected:
                lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in answers.rejected]
                replace_file(self.rejected(part), "".join(lines).encode())
            counts = json.dumps(tally._asdict()).encode()
            replace_file(self.folder / f"{part.name}.counts.json", counts)
        return tally

    def answers(self, part: Part) -> Path:
        """File of a part's answers, as :func:`~gpumemnet.batch.part_predictions.encode` gives them."""
        return self.folder / f"{part.name}.{self.output_format}"

    def rejected(self, part: Part) -> Path:
        """File of a part's rejected rows; it exists only if there are any."""
        return self.folder / f"{part.name}.rejected.jsonl"


@contextmanager
def part_files(out: Path, key: str, output_format: str) -> Iterator[PartFiles]:
    """Opens and locks the folder of the batch ``key`` with the output ``out``; removes those of
    other batches with that output, and at the end its own.

    The folder is next to the output.

    Raises:
        InvalidRequestError: when another run writes the same output.
        DatasetError: when the folder cannot be created.
    """
    place, name = out.parent, out.name
    lock = place / f".{name}.lock"
    own = place / f".{name}.parts-{key}"
    with ExitStack() as stack:
        busy = f"another run is writing {name} in {place}: wait for it, or choose another file"
        with no_room(place):
            stack.enter_context(locked(lock, 0.0, InvalidRequestError(busy, "out")))
            for other in place.glob(f".{glob.escape(name)}.parts-*"):
                if other != own:
                    shutil.rmtree(other, ignore_errors=True)
            own.mkdir(exist_ok=True)
            remove_staging(own)
        yield PartFiles(own, output_format)
        shutil.rmtree(own, ignore_errors=True)
        with suppress(OSError):
            lock.unlink()


def batch_key(
    files: Iterable[JobFile],
    hash_of_model: Mapping[str, str],
    gpu: str,
    options: BatchOptions,
    output_format: str,
) -> str:
    """Hash of everything that the answers of a batch depend on; an input counts with its location,
    format, size and stamp."""
    facts = {
        "form": (_VERSION, CHUNK_ROWS, PART_ROWS, output_format),
        "versions": [version(name) for name in ("gpumemnet", "numpy", "onnxruntime", "pyarrow")],
        "inputs": [asdict(file) for file in files],
        "models": list(hash_of_model.values()),
        "gpu": gpu,
        "options": asdict(options) | {"bundles": None},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


class Output:
    """The output of a running batch: :meth:`add` takes parts in order, and :meth:`publish` makes
    the file visible.

    Raises (all methods):
        DatasetError: when the output cannot be written; finished parts are kept.
    """

    def __init__(self, out: Path, parts: PartFiles) -> None:
        self._out = out
        self._parts = parts
        self._path = parts.folder / f"{STAGING_PREFIX}joined"
        self._rejected_path = parts.folder / f"{STAGING_PREFIX}rejected"
        with no_room(parts.folder):
            self._stream = self._path.open("wb")
            self._rejected = self._rejected_path.open("wb")
            if parts.output_format == "csv":
                self._stream.write(",".join(answer_schema().names).encode() + b"\n")
        self._writer = _parquet_writer(self._stream) if parts.output_format == "parquet" else None

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # after a failure, what is left to write may fail again
            self._close()

    def add(self, part: Part) -> None:
        """Adds the next part."""
        import pyarrow as pa

        with no_room(self._out):
            if self._writer is None:
                _append(self._parts.answers(part), self._stream)
            else:
                content = self._parts.answers(part).read_bytes()
                self._writer.write_table(pa.ipc.open_stream(content).read_all())
            if self._parts.rejected(part).exists():
                _append(self._parts.rejected(part), self._rejected)

    def publish(self, total: Tally) -> None:
        """Publishes the rejected rows and, unless all were rejected, the output; both replace older
        files."""
        with no_room(self._out):
            self._close()
            rejected = rejected_file(self._out)
            if total.rejected:
                self._rejected_path.replace(rejected)
            else:
                rejected.unlink(missing_ok=True)
            if total.answered or not total.rejected:
                self._path.replace(self._out)
            sync_folder(self._out.parent)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        for stream in (self._stream, self._rejected):
            if not stream.closed:
                stream.flush()
                os.fsync(stream.fileno())
                stream.close()


def rejected_file(out: Path) -> Path:
    """The file of the rejected rows of an output: ``predictions.parquet`` →
    ``predictions.rejected.jsonl``."""
    return out.with_suffix(".rejected.jsonl")


def checked_output(location: str, files: Iterable[JobFile]) -> Path:
    """The path of the output, which is a local file, and not one of the inputs, in a folder that
    exists.

    Raises:
        InvalidRequestError: when it is in a store, or cannot be written.
        DatasetError: when it is one of the inputs.
    """
    if is_url(location):
        raise InvalidRequestError(f"{location} must be a local file; inputs may be URLs", "out")
    path = local_path(location)
    inputs = {local_path(file.location).resolve() for file in files if not is_url(file.location)}
    if path.resolve() in inputs:
        raise DatasetError(f"{location} is one of the inputs: choose another file for the answers")
    check_writable(path)
    return path


def _parquet_writer(stream: Any) -> Any:
    import pyarrow.parquet as pq

    schema = answer_schema()
    plain = ("row", "request_mib", "limit_mib", "job_id")
    return pq.ParquetWriter(
        stream,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=[name for name in schema.names if name not in plain],
        column_encoding={"row": "DELTA_BINARY_PACKED"},
    )


def _append(path: Path, stream: Any) -> None:
    with path.open("rb") as source:
        shutil.copyfileobj(source, stream, 2**20)
