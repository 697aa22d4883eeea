"""Child process of the bundle fuzz test: loads the bundle in each folder that a line names, and
says in a line what came of it.

A spoilt graph may crash or exhaust the process that runs it, which must not be the test's own.
"""

import json
import os
import resource
import sys
import traceback

from gpumemnet.errors import BundleError
from gpumemnet.job.json_codec import job_from_dict
from gpumemnet.predict.bundle import load_bundle
from gpumemnet.predict.predictor import Predictor
from service.api.examples import EXAMPLE_JOBS
from service.api.predictions import PredictionApi

MEMORY_BYTES = 8 * 2**30


def tried(folder: str) -> dict[str, str]:
    """What came of the bundle: as the command line uses it, and then as the service starts with
    it."""
    try:
        predictor = Predictor([load_bundle(folder)])
        family = predictor.bundles[0].card.families[0]
        estimates = predictor.predict_many(
            [
                job_from_dict({**EXAMPLE_JOBS[family], "batch_size": size})
                for size in (1, 64, 100_000)
            ]
        )
        PredictionApi(predictor, 10)
    except BundleError as error:
        return {"came_to": "refused", "detail": str(error)}
    except Exception:
        return {"came_to": "failed", "detail": traceback.format_exc()}
    for estimate in estimates:
        total = float(estimate.probabilities.sum())
        if not (
            estimate.expected_bytes >= 0
            and abs(total - 1) < 1e-6
            and estimate.probabilities.min() >= 0
        ):
            return {
                "came_to": "answers nonsense",
                "detail": f"expected {estimate.expected_bytes}, probabilities sum to {total}",
            }
    return {"came_to": "works", "detail": ""}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what a library prints by itself shall not pass for an answer
        for line in sys.stdin:
            answers.write(json.dumps(tried(line.rstrip("\n"))) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
