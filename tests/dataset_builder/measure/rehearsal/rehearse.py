"""A campaign of stand-ins as a process of its own, so that a test can kill it.

``rehearse.py FOLDER MODE JOBS [WORKERS [BUDGET [DEADLINE]]]``; the mode is that of the stand-in
meter, or ``ray`` for a Ray cluster of this machine that believes it has two GPUs (the second is
lost where the folder holds a file ``lose``).
"""

import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path

from stand_in import TOTAL_BYTES, StandInMeter

from dataset_builder.measure.campaign import Tally
from dataset_builder.measure.engine import Engine
from dataset_builder.measure.journal import Journal, Settings
from dataset_builder.measure.local_engine import LocalEngine
from dataset_builder.measure.pool import RunSettings
from dataset_builder.measure.progress import ProgressLine
from dataset_builder.recipe.recipe import load_recipe
from dataset_builder.recipe.sampling import sample_jobs
from gpumemnet.errors import GpumemnetError

CHILD = "stand_in:measure"


def main(
    folder: Path,
    mode: str,
    jobs: int,
    workers: int = 4,
    budget: float | None = None,
    deadline: float = 30.0,
) -> None:
    started = time.monotonic()
    recipe = load_recipe(str(Path(__file__).parents[2] / "small_recipes" / "mlp.yaml"))
    with Journal(folder) as journal:
        settings = Settings(recipe.name, recipe.digest, 0, jobs)
        planned = journal.plan(settings)
        if planned is None:
            planned = sample_jobs(recipe, jobs, 0, TOTAL_BYTES // 16)
            journal.keep_plan(settings, planned)
        tally = Tally(jobs, len(journal.finished), started, budget)
        run = RunSettings(recipe.name, 0, workers, deadline, folder)
        left = [job for job in planned if job.key not in journal.finished]
        line = ProgressLine()
        with _engine(folder, mode) as gpus:
            gpus.measure(left, lambda job, row: journal.append(job.key, row), run, tally, line)
        line.close(tally)


def _engine(folder: Path, mode: str) -> AbstractContextManager[Engine]:
    if mode != "ray":
        return LocalEngine(meters=lambda: [StandInMeter(folder, mode)], child=CHILD)
    import ray
    from stand_in import ray_meters

    from dataset_builder.measure.ray_engine import RayEngine

    ray.init(
        num_gpus=2, num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    return RayEngine(meters=ray_meters, child=CHILD)


if __name__ == "__main__":
    folder, mode, jobs, *rest = sys.argv[1:]
    try:
        main(
            Path(folder),
            mode,
            int(jobs),
            *(int(rest[0]),) if rest else (),
            *(float(each) for each in rest[1:]),
        )
    except GpumemnetError as error:
        sys.exit(f"error: {error}")
