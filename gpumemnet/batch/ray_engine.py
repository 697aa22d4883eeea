"""Processes parts on a Ray cluster with Ray Data: the parts are the rows of a dataset, and actors
hold the models.

Each actor reads its parts itself, so every node needs access to the inputs: URLs, or a shared
folder.  Answers return to this process, which writes the output.  They equal those of the local
engine bit for bit, because both use the same chunks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Final

from gpumemnet.batch.answers import Rejected, answer_schema
from gpumemnet.batch.job_part import Work, answer_part, keep_batches
from gpumemnet.batch.plan import Part
from gpumemnet.batch.ray_loading import connect, last_line, load_ray, package_folders
from gpumemnet.batch.scratch import Scratch, Tally
from gpumemnet.errors import DatasetError, GpumemnetError
from gpumemnet.job.reader import Reader

_PART_FIELDS: Final = ("file", "first_row", "row_count", "start", "stop", "run")


def answer_on_ray(
    work: Work,
    scratch: Scratch,
    workers: int | None,
    parts: Iterator[Part],
    on_rows: Callable[[int], None],
    done: Callable[[Part, Tally], None],
) -> None:
    """Processes the parts on the Ray cluster in ``RAY_ADDRESS``, else on one that runs here, else
    on a new local one.

    Args:
        work: settings that all parts share.
        scratch: the folder of finished parts.
        workers: number of actors; by default the number of the cluster's cores.
        parts: the parts to process.
        on_rows: called with the number of processed rows.
        done: called for each finished part.

    Raises:
        MissingExtraError: when Ray is not installed.
        DatasetError: when the cluster cannot be reached or loses a part, a file is damaged, or
            answers cannot be written.
    """
    ray = load_ray()
    left = list(parts)
    if not left:
        return
    is_ours = not ray.is_initialized()
    if is_ours:
        environment: dict[str, Any] = {"env_vars": {"OMP_NUM_THREADS": "1"}}
        if os.environ.get("RAY_ADDRESS"):
            environment["py_modules"] = package_folders(__name__)
        connect(ray, environment, DatasetError)
    try:
        _answer(ray, work, scratch, workers, left, on_rows, done)
    finally:
        if is_ours:
            ray.shutdown()


def _answer(
    ray: Any,
    work: Work,
    scratch: Scratch,
    workers: int | None,
    parts: list[Part],
    on_rows: Callable[[int], None],
    done: Callable[[Part, Tally], None],
) -> None:
    import ray.data as ray_data

    context = ray_data.DataContext.get_current()
    context.enable_progress_bars = False  # gpumemnet.batch.progress reports the progress
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    context.print_on_execution_start = False
    context.max_errored_blocks = 0
    count = min(workers or max(1, int(ray.cluster_resources().get("CPU", 1))), len(parts))
    rows = ray_data.from_items([asdict(part) for part in parts], override_num_blocks=len(parts))
    answers = rows.map_batches(
        _Answerer,
        fn_constructor_args=(work,),
        batch_size=1,
        batch_format="pyarrow",
        zero_copy_batch=True,
        compute=ray_data.ActorPoolStrategy(size=count),
        num_cpus=1,
    )
    try:
        for block in answers.iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=1
        ):
            for row in range(len(block)):
                part, tally = _keep(work, scratch, block.slice(row, 1))
                on_rows(part.row_count)
                done(part, tally)
    except ray.exceptions.RayError as error:
        raise DatasetError(
            f"the Ray cluster lost a part ({last_line(error)}); finished parts are kept: the same command, run again, goes on"
        ) from None


def _keep(work: Work, scratch: Scratch, row: Any) -> tuple[Part, Tally]:
    import pyarrow as pa

    document = {name: row.column(name)[0].as_py() for name in (*_PART_FIELDS, "error", "rejected")}
    if document["error"]:
        raise DatasetError(document["error"])
    part = Part(**{name: document[name] for name in _PART_FIELDS})
    reader = pa.ipc.open_stream(row.column("answers")[0].as_buffer())
    rejected = [Rejected(**each) for each in document["rejected"]]
    return part, keep_batches(work, scratch, part, list(reader), rejected)


class _Answerer:
    """Actor that holds the loaded models and turns rows with parts into rows with their answers."""

    def __init__(self, work: Work) -> None:
        import pyarrow as pa

        pa.set_cpu_count(1)
        pa.set_io_thread_count(1)
        self._work = work
        self._reader = Reader(work.options.id_column)
        self._predictor = work.options.predictor()
        hashes = {bundle.card.name: bundle.sha256 for bundle in self._predictor.bundles}
        self._trouble = ""
        if hashes != dict(zip(work.names.models, work.names.hashes, strict=True)):
            self._trouble = "a node of the Ray cluster has other models: install the same gpumemnet and bundles everywhere"

    def __call__(self, table: Any) -> Any:
        import pyarrow as pa

        answers, rejected, errors = [], [], []
        for document in table.select(_PART_FIELDS).to_pylist():
            error, batches, refused = self._trouble, [], []
            if not error:
                try:
                    answered = answer_part(
                        self._work, self._predictor, self._reader, Part(**document), lambda _: None
                    )
                    batches = [each.batch for each in answered]
                    refused = [row._asdict() for each in answered for row in each.rejected]
                except GpumemnetError as trouble:
                    error = str(trouble)
            answers.append(_bytes(batches))
            rejected.append(refused)
            errors.append(error)
        refusal = pa.struct([("row", pa.int64()), ("field", pa.string()), ("reason", pa.string())])
        columns = [table.column(name) for name in _PART_FIELDS]
        return pa.table(
            [
                *columns,
                pa.array(errors, pa.string()),
                pa.array(rejected, pa.list_(refusal)),
                pa.array(answers, pa.large_binary()),
            ],
            names=[*_PART_FIELDS, "error", "rejected", "answers"],
        )


def _bytes(batches: list[Any]) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, answer_schema()) as writer:
        for batch in batches:
            writer.write_batch(batch)
    content: bytes = sink.getvalue().to_pybytes()
    return content
