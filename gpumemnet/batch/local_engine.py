"""Answers parts with processes of this machine, one for each core, or with this one where there is little to do."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

from gpumemnet.batch.chunks import PartReader
from gpumemnet.batch.plan import Part
from gpumemnet.batch.scratch import Scratch, Tally
from gpumemnet.batch.work import Work, answer_part, keep_part
from gpumemnet.batch.worker import work_document
from gpumemnet.errors import DatasetError
from gpumemnet.predictor import Predictor

Done = Callable[[Part, Tally], None]
Rows = Callable[[int], None]

_ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_READ_BYTES: Final = 2**16


def answer_here(work: Work, scratch: Scratch, predictor: Predictor, parts: Iterator[Part], on_rows: Rows, done: Done) -> None:
    """Answer the parts in this process.

    Raises:
        DatasetError: when a file is damaged, or answers cannot be written.
    """
    with PartReader() as reader:
        for part in parts:
            done(part, keep_part(work, scratch, part, answer_part(work, predictor, reader, part, on_rows)))


def answer_in_processes(work: Work, scratch: Scratch, count: int, parts: Iterator[Part], on_rows: Rows, done: Done) -> None:
    """Answer the parts in ``count`` processes; ``done`` hears of each part as it is finished, in any order.

    Raises:
        DatasetError: when a file is damaged, answers cannot be written, or a process was killed.
    """
    workers: list[_Worker] = []
    try:
        with selectors.DefaultSelector() as selector:
            for _ in range(count):
                worker = _Worker(work, scratch)
                workers.append(worker)
                selector.register(worker.output, selectors.EVENT_READ, worker)
                worker.take(next(parts, None))
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
                            worker.take(next(parts, None))
                            assert part is not None
                            done(part, Tally(**value))
                    if worker.has_ended:
                        selector.unregister(worker.output)
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """One process, and the part that it is at."""

    def __init__(self, work: Work, scratch: Scratch) -> None:
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
        """Begin with the next part; there is none left where it is ``None``."""
        self.part = part
        if part is not None:
            self._say(asdict(part))
        elif self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def messages(self) -> list[tuple[str, Any]]:
        """What it said since it was last asked.

        Raises:
            DatasetError: when it was killed with its part unfinished.
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
        """End it, whatever it is at."""
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
        with suppress(BrokenPipeError):  # its end is seen where its answers are read
            self._process.stdin.write(json.dumps(document).encode() + b"\n")
