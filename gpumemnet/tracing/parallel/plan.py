"""How a job is spread over several GPUs, checked; loads no torch."""

from __future__ import annotations

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.job.training_options import MAX_RANKS
from gpumemnet.physics.element_types import SCALED_PRECISIONS
from gpumemnet.tracing.options import PARALLEL, TraceOptions


def check_plan(options: TraceOptions, wants_job: bool) -> None:
    """Check that such a job can be traced.

    Args:
        options: how the model is trained.
        wants_job: whether a :class:`~gpumemnet.job.training_job.TrainingJob` is wanted of it.

    Raises:
        InvalidRequestError: says what does not go together.
    """
    parallel, ranks = options.parallel, options.ranks
    if parallel == "none":
        if ranks > 1:
            raise InvalidRequestError(f"{ranks:,} GPUs need a way to be used: say parallel {', '.join(PARALLEL[1:])}", "ranks")
        return
    if ranks == 1:
        raise InvalidRequestError(f"{parallel} needs at least 2 GPUs: say how many", "ranks")
    if options.precision in SCALED_PRECISIONS and parallel != "ddp":
        raise InvalidRequestError(f"{options.precision} does not go with sharded parameters here: use amp_bf16", "precision")
    if wants_job and parallel != "ddp":
        raise InvalidRequestError("a training job knows replicas (ddp) and no shards: leave the job out", "parallel")


def check_ranks(ranks: int) -> int:
    """``ranks``, if there can be so many.

    Raises:
        InvalidRequestError: says how many there can be.
    """
    if type(ranks) is not int or not 1 <= ranks <= MAX_RANKS:
        raise InvalidRequestError(f"must be a number of GPUs from 1 to {MAX_RANKS:,}, not {describe(ranks)}", "ranks")
    return ranks
