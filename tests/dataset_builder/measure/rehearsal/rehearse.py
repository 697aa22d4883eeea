"""A campaign (``rehearse.py FOLDER MODE JOBS [WORKERS BUDGET DEADLINE]``) or a probe (``rehearse.py
FOLDER MODE probe``) with stand-ins for the GPU."""

from __future__ import annotations

import json
import sys
import time
from math import inf
from pathlib import Path

from stand_in import TOTAL_BYTES, StandInMeter

from dataset_builder.measure import gpu_process
from dataset_builder.measure.campaign import RunSettings, Tally, run_campaign
from dataset_builder.measure.gpu_process import probe_device
from dataset_builder.measure.journal import Journal, Settings
from dataset_builder.recipe import load_recipe, sample_jobs
from gpumemnet.cli.output import progress_bar
from gpumemnet.errors import GpumemnetError

gpu_process.CHILD = "stand_in:measure"


def main(
    folder: Path,
    mode: str,
    jobs: int,
    workers: int = 4,
    budget: float = inf,
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
        meters = [StandInMeter(folder, mode)]
        with progress_bar("measuring") as show:
            run_campaign(
                left, lambda job, row: journal.append(job.key, row), meters, run, tally, show
            )


if __name__ == "__main__":
    folder, mode, jobs, *rest = sys.argv[1:]
    try:
        if jobs == "probe":
            print(json.dumps(probe_device(StandInMeter(Path(folder), mode))))
        else:
            limits = (*(int(each) for each in rest[:1]), *(float(each) for each in rest[1:]))
            main(Path(folder), mode, int(jobs), *limits)
    except GpumemnetError as error:
        sys.exit(f"error: {error}")
