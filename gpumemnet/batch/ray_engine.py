"""Predicts parts on a Ray cluster with Ray Data; actors hold the models.

Each actor reads its parts itself, so every node needs access to the inputs: URLs, or a shared
folder.  Answers return to this process, which writes the output.  They equal those of the local
engine bit for bit, because both use the same chunks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gpumemnet
from gpumemnet.batch.finished_parts import PartFiles, Tally
from gpumemnet.batch.part_predictions import Answers, BatchOptions, PartPredictor, encode
from gpumemnet.batch.parts import Part
from gpumemnet.errors import DatasetError, GpumemnetError, check_installed


def predict_on_ray(
    kept: PartFiles,
    options: BatchOptions,
    hash_of_model: Mapping[str, str],
    parts: Sequence[Part],
    workers: int | None,
) -> Generator[tuple[Part, Tally]]:
    """Predicts the parts on the Ray cluster in ``RAY_ADDRESS``, else on one that runs here, else on
    a new local one; yields each as it is finished.

    Args:
        kept: the folder of finished parts.
        options: the options of the batch.
        hash_of_model: the bundles that every node must have.
        parts: the parts to predict.
        workers: number of actors; by default the number of the cluster's cores.

    Raises:
        MissingExtraError: when Ray is not installed.
        DatasetError: when the cluster cannot be reached or loses a part, a file is damaged, or
            answers cannot be written.
    """
    ray = load_ray()
    if not parts:
        return
    import pyarrow as pa
    import ray.data as ray_data

    is_ours = not ray.is_initialized()
    if is_ours:
        environment: dict[str, Any] = {"env_vars": {"OMP_NUM_THREADS": "1"}}
        if os.environ.get("RAY_ADDRESS"):
            environment["py_modules"] = [str(Path(gpumemnet.__file__).parent)]
        connect(ray, environment)
    try:
        context = ray_data.DataContext.get_current()
        context.enable_progress_bars = False  # gpumemnet.batch.run reports the progress
        context.print_on_execution_start = False
        context.max_errored_blocks = 0
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)
        count = min(workers or max(1, int(ray.cluster_resources().get("CPU", 1))), len(parts))
        # Items, not a range: tasks that read a range would wait for cores, which the actors hold.
        rows = [{"id": index} for index in range(len(parts))]
        predicted = ray_data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            _Actor,
            fn_constructor_args=(options, hash_of_model, parts),
            batch_size=1,
            batch_format="pyarrow",
            zero_copy_batch=True,
            compute=ray_data.ActorPoolStrategy(size=count),
            num_cpus=1,
        )
        for block in predicted.iter_batches(batch_size=None, batch_format="pyarrow"):
            for row in range(len(block)):
                index, error, content, rejected = (column[row] for column in block.columns)
                if error.is_valid:
                    raise DatasetError(error.as_py())
                part = parts[index.as_py()]
                batches = list(pa.ipc.open_stream(content.as_buffer()))
                yield part, kept.keep(part, Answers(batches, rejected.as_py()))
    except ray.exceptions.RayError as error:
        raise DatasetError(
            f"the Ray cluster lost a part ({_last_line(error)}); finished parts are kept: the same command, run again, goes on"
        ) from None
    finally:
        if is_ours:
            ray.shutdown()


class _Actor:
    """Holds the loaded models, and turns the position of a part into a row with its answers."""

    def __init__(
        self, options: BatchOptions, hash_of_model: Mapping[str, str], parts: Sequence[Part]
    ) -> None:
        import pyarrow as pa

        pa.set_cpu_count(1)
        pa.set_io_thread_count(1)
        self._parts = parts
        self._predictor = PartPredictor(options)
        self._has_models = self._predictor.hash_of_model == hash_of_model

    def __call__(self, batch: Any) -> Any:
        import pyarrow as pa

        [index] = batch.column("id").to_pylist()
        answers, problem = Answers([], []), None
        if not self._has_models:
            problem = "a node of the Ray cluster has other models: install the same gpumemnet and bundles everywhere"
        else:
            try:
                answers = self._predictor.predict(self._parts[index])
            except GpumemnetError as error:
                problem = str(error)
        texts = (pa.string(), pa.int64(), pa.string(), pa.string())
        rejected = pa.struct(list(zip(("input", "row", "field", "reason"), texts, strict=True)))
        return pa.table(
            [
                pa.array([index]),
                pa.array([problem], pa.string()),
                pa.array([encode(answers.batches, "parquet")], pa.large_binary()),
                pa.array([answers.rejected], pa.list_(rejected)),
            ],
            names=["index", "error", "answers", "rejected"],
        )


def load_ray() -> Any:
    """Imports Ray with its usage statistics disabled, unless the user enables them.

    Raises:
        MissingExtraError: when Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    check_installed("ray", "ray", "--engine ray")
    import ray

    return ray


def connect(ray: Any, runtime_env: Mapping[str, Any]) -> None:
    """Connects to the cluster that ``RAY_ADDRESS`` names, to one that runs on this machine, or
    starts one here.

    Args:
        ray: the module.
        runtime_env: Ray's description of the workers' environment.

    Raises:
        DatasetError: when that fails.
    """
    try:
        ray.init(runtime_env=dict(runtime_env), log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises a plain Exception when a node does not start in time
        raise DatasetError(
            f"the Ray cluster cannot be reached ({_last_line(error)}): RAY_ADDRESS names it, and a cluster with token "
            "authentication needs its token on this machine too"
        ) from None


def _last_line(error: BaseException) -> str:
    """The last line of the message, which names the cause of the errors that Ray wraps around
    it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
