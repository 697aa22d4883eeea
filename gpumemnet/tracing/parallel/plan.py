"""Checks how a job uses several GPUs; loads no torch."""

from __future__ import annotations

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.job.training_options import MAX_RANKS
from gpumemnet.physics.element_types import SCALED_PRECISIONS
from gpumemnet.tracing.options import PARALLEL, TraceOptions


def check_plan(options: TraceOptions, wants_job: bool) -> None:
    """Check that a job with these options can be traced.

    Args:
        options: how the model is trained.
        wants_job: whether the training job is to be returned too.

    Raises:
        InvalidRequestError: names options that exclude each other.
    """
    parallel, ranks = options.parallel, options.ranks
    if parallel == "none":
        if ranks > 1:
            raise InvalidRequestError(f"{ranks:,} GPUs need a value of parallel: use {', '.join(PARALLEL[1:])}", "ranks")
        return
    if ranks == 1:
        raise InvalidRequestError(f"{parallel} needs at least 2 GPUs; set ranks", "ranks")
    if options.precision in SCALED_PRECISIONS and parallel != "ddp":
        raise InvalidRequestError(f"{options.precision} is not supported with sharded parameters; use amp_bf16", "precision")
    if wants_job and parallel != "ddp":
        raise InvalidRequestError("a training job can describe replicas (ddp), not shards; do not request the job", "parallel")


def check_ranks(ranks: int) -> int:
    """Return ``ranks`` if it is in range.

    Raises:
        InvalidRequestError: names the range.
    """
    if type(ranks) is not int or not 1 <= ranks <= MAX_RANKS:
        raise InvalidRequestError(f"must be a number of GPUs from 1 to {MAX_RANKS:,}, not {describe(ranks)}", "ranks")
    return ranks
