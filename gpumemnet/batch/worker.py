"""Worker process of a local batch: ``python -m gpumemnet.batch.worker`` reads parts from standard
input until it ends.

Messages are lines of JSON.  The input holds the settings first, then one part per line.  The output
holds the number of rows processed since the last message, and after each part its counts, or an
error message.  The worker exits when its output is closed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpumemnet.batch.job_part import Work, answer_part, keep_part
from gpumemnet.batch.options import BatchOptions, Names
from gpumemnet.batch.plan import Part
from gpumemnet.batch.scratch import Scratch
from gpumemnet.errors import GpumemnetError
from gpumemnet.job.job_files import JobFile
from gpumemnet.job.reader import Reader
from gpumemnet.predict.distribution import BinScheme


def work_document(work: Work, scratch: Scratch) -> dict[str, Any]:
    """Converts the settings to the JSON object that a worker reads first."""
    return {"work": asdict(work), "scratch": str(scratch.folder)}


def work_from(document: dict[str, Any]) -> tuple[Work, Scratch]:
    """Reads the settings that :func:`work_document` wrote."""
    work = document["work"]
    options = work["options"]
    options["bundles"] = tuple(options["bundles"])
    if options["bins"] is not None:
        options["bins"] = BinScheme(**options["bins"])
    names = work["names"]
    made = Work(
        BatchOptions(**options),
        Names(tuple(names["models"]), tuple(names["hashes"]), names["gpu"]),
        tuple(JobFile(**file) for file in work["inputs"]),
        work["output_format"],
    )
    return made, Scratch(Path(document["scratch"]), made.output_format)


def main() -> int:
    """Processes parts until the input ends; returns the exit code."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C also reaches the parent, which stops its workers
    say = _Voice(os.dup(1))
    try:
        work, scratch = work_from(json.loads(sys.stdin.readline()))
        _one_thread()
        predictor = work.options.predictor()
        with Reader(work.options.id_column) as reader:
            for line in sys.stdin:
                part = Part(**json.loads(line))
                answered = answer_part(
                    work, predictor, reader, part, lambda rows: say.message("rows", rows)
                )
                say.message("tally", asdict(keep_part(work, scratch, part, answered)))
    except GpumemnetError as error:
        say.message("error", str(error))
    return 0


class _Voice:
    def __init__(self, descriptor: int) -> None:
        self._stream = os.fdopen(descriptor, "w", buffering=1)

    def message(self, name: str, value: object) -> None:
        try:
            self._stream.write(json.dumps({name: value}) + "\n")
        except BrokenPipeError:
            os._exit(1)  # the parent has ended


def _one_thread() -> None:
    """Limits pyarrow to one thread, because every core has its own worker."""
    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


if __name__ == "__main__":
    sys.exit(main())
