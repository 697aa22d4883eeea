"""Processes parts on this machine: in several processes, or in this one when the batch is small."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import groupby
from typing import Any, Final

from gpumemnet.batch.job_part import Work, answer_part, keep_part
from gpumemnet.batch.plan import Part
from gpumemnet.batch.scratch import Scratch, Tally
from gpumemnet.batch.worker import work_document
from gpumemnet.errors import DatasetError
from gpumemnet.job.reader import Reader
from gpumemnet.predict.predictor import Predictor

Done = Callable[[Part, Tally], None]
Rows = Callable[[int], None]

_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Every chunk allocates and frees arrays of a few MiB: with these limits the C library keeps
    # that memory for reuse.
    "MALLOC_MMAP_THRESHOLD_": str(64 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
}
_READ_BYTES: Final = 2**16


def answer_here(
    work: Work,
    scratch: Scratch,
    predictor: Predictor,
    parts: Iterator[Part],
    on_rows: Rows,
    done: Done,
) -> None:
    """Processes the parts in this process.

    Raises:
        DatasetError: when a file is damaged, or answers cannot be written.
    """
    with Reader(work.options.id_column) as reader:
        for part in parts:
            done(
                part,
                keep_part(work, scratch, part, answer_part(work, predictor, reader, part, on_rows)),
            )


def answer_in_processes(
    work: Work, scratch: Scratch, count: int, parts: Iterator[Part], on_rows: Rows, done: Done
) -> None:
    """Processes the parts in ``count`` processes; calls ``done`` for each finished part, in any
    order.

    Raises:
        DatasetError: when a file is damaged, answers cannot be written, or a process was killed.
    """
    workers: list[_Worker] = []
    shares = _Shares(parts, count)
    try:
        with selectors.DefaultSelector() as selector:
            for number in range(count):
                worker = _Worker(number, work, scratch)
                workers.append(worker)
                selector.register(worker.output, selectors.EVENT_READ, worker)
                worker.take(shares.next_of(number))
            while any(worker.part is not None for worker in workers):
                for key, _ in selector.select():
                    worker = key.data
                    for name, value in worker.messages():
                        if name == "rows":
                            on_rows(value)
                        elif name == "error":
                            raise DatasetError(value)
                        elif name == "tally":
                            part = worker.part
                            worker.take(shares.next_of(worker.number))
                            assert part is not None
                            done(part, Tally(**value))
                    if worker.has_ended:
                        selector.unregister(worker.output)
    finally:
        for worker in workers:
            worker.stop()


class _Shares:
    """Assigns parts to processes.

    One process reads a whole row group, because rows of a group can only be reached by reading the
    ones before them.  When no row group is left, a process takes the last part of the process with
    the most parts left.
    """

    def __init__(self, parts: Iterator[Part], count: int) -> None:
        self._runs = groupby(parts, key=lambda part: (part.file, part.run))
        self._left: list[deque[Part]] = [deque() for _ in range(count)]

    def next_of(self, number: int) -> Part | None:
        """The next part for the process with this number; ``None`` when no part is left."""
        own = self._left[number]
        if not own:
            for _, run in self._runs:
                own.extend(run)
                break
        if own:
            return own.popleft()
        longest = max(self._left, key=len)
        return longest.pop() if longest else None


class _Worker:
    """One worker process, with its number and current part."""

    def __init__(self, number: int, work: Work, scratch: Scratch) -> None:
        self.number = number
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpumemnet.batch.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_ENVIRONMENT},
            bufsize=0,
        )
        assert self._process.stdout is not None
        self.output = self._process.stdout
        self.part: Part | None = None
        self.has_ended = False
        self._rest = b""
        self._say(work_document(work, scratch))

    def take(self, part: Part | None) -> None:
        """Sends the next part to the process; ``None`` tells it that no part is left."""
        self.part = part
        if part is not None:
            self._say(asdict(part))
        elif self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def messages(self) -> list[tuple[str, Any]]:
        """Reads the messages of the process since the last call.

        Raises:
            DatasetError: when the process ended before its part was finished.
        """
        content = os.read(self.output.fileno(), _READ_BYTES)
        if not content:
            self.has_ended = True
            if self.part is not None:
                raise DatasetError(
                    f"a worker process ended before its time ({self._ending()}): where memory ran out try fewer --workers; "
                    "finished parts are kept: the same command, run again, goes on"
                )
            return []
        *lines, self._rest = (self._rest + content).split(b"\n")
        return [item for line in lines for item in json.loads(line).items()]

    def stop(self) -> None:
        """Kills the process and closes its streams."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _ending(self) -> str:
        code = self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _say(self, document: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # messages() notices that the process has ended
            self._process.stdin.write(json.dumps(document).encode() + b"\n")
