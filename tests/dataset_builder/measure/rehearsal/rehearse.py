"""A campaign of stand-ins as a process of its own, so that a test can kill it.

``rehearse.py FOLDER MODE JOBS [WORKERS [BUDGET [DEADLINE]]]``; the mode is that of the stand-in
meter.
"""

import sys
import time
from pathlib import Path

from stand_in import TOTAL_BYTES, StandInMeter

from dataset_builder.measure.campaign import ProgressLine, Tally, fork_server, run_campaign
from dataset_builder.measure.journal import Journal, Settings
from dataset_builder.measure.pool import RunSettings
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
        meters = [StandInMeter(folder, mode)]
        with fork_server(folder, CHILD) as server:
            run_campaign(
                left,
                lambda job, row: journal.append(job.key, row),
                server,
                meters,
                run,
                tally,
                line,
            )
        line.close(tally)


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
