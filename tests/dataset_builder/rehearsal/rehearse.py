"""A campaign of stand-ins as a process of its own, so that a test can kill it.

``rehearse.py FOLDER MODE JOBS [WORKERS [BUDGET [DEADLINE]]]``
"""

import sys
import time
from pathlib import Path

from stand_in import TOTAL_BYTES, StandInMeter

from dataset_builder import campaign
from dataset_builder.journal import Journal, Settings
from dataset_builder.pool import RunSettings
from dataset_builder.progress import ProgressLine
from dataset_builder.recipe import load_recipe
from dataset_builder.sampling import sample_jobs
from gpumemnet.errors import GpumemnetError


def main(folder: Path, mode: str, jobs: int, workers: int = 4, budget: float | None = None, deadline: float = 30.0) -> None:
    started = time.monotonic()
    recipe = load_recipe("mlp")
    with Journal(folder) as journal:
        settings = Settings(recipe.name, recipe.digest, 0, jobs)
        planned = journal.plan(settings)
        if planned is None:
            planned = sample_jobs(recipe, jobs, 0, TOTAL_BYTES // 16)
            journal.keep_plan(settings, planned)
        tally = campaign.Tally(jobs, len(journal.finished), started, budget)
        run = RunSettings(recipe.name, 0, workers, deadline, folder)
        line = ProgressLine()
        with campaign.fork_server(folder, "stand_in:measure") as server:
            meter = StandInMeter(folder, mode)
            campaign.run_campaign(planned, journal, server, [meter], run, tally, line)
        line.close(tally)


if __name__ == "__main__":
    folder, mode, jobs, *rest = sys.argv[1:]
    try:
        main(Path(folder), mode, int(jobs), *(int(rest[0]),) if rest else (), *(float(each) for each in rest[1:]))
    except GpumemnetError as error:
        sys.exit(f"error: {error}")
