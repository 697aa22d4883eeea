"""Shares of a GPU for jobs, as Ray hands them out: ``num_gpus=0.25`` means that four such tasks may
sit on one.

Ray looks at no memory and enforces none.  A share of the safe amount over what the GPU has keeps
the sum of the safe amounts below its memory.  It is right for one GPU model only, so a cluster of
several needs ``accelerator_type`` beside it.
"""

from __future__ import annotations

from typing import Any, Final

from gpumemnet import Prediction, Predictor, TrainingJob
from gpumemnet.predict.gpu_fit import target
from gpumemnet.predict.prediction import DEFAULT_COVERAGE
from gpumemnet.units import MIB, ceil_mib

SHARES_PER_GPU: Final = 10_000
"""Ray counts resources in ten-thousandths."""


class RayResources(dict[str, Any]):
    """Options for ``ray.remote`` or ``.options``, to be given as ``**resources``.

    Attributes:
        estimate: what was predicted.
        available_bytes: what the GPU has for processes.
        reasons: why a whole GPU is asked for, one sentence each; empty where a share is.
    """

    def __init__(
        self,
        options: dict[str, Any],
        estimate: Prediction,
        available_bytes: int,
        reasons: tuple[str, ...],
    ) -> None:
        super().__init__(options)
        self.estimate = estimate
        self.available_bytes = available_bytes
        self.reasons = reasons


def ray_resources(
    job: TrainingJob,
    gpu: str,
    *,
    coverage: float = DEFAULT_COVERAGE,
    memory_resource: str | None = None,
    predictor: Any = None,
) -> RayResources:
    """The resources to ask Ray for, as in ``ray.remote(**ray_resources(job, "A100"))(train)``.

    ``num_gpus`` is the safe amount over what the GPU has, rounded up to four digits, the finest
    that Ray counts.  It is 1, and ``reasons`` says why, where the job lies outside the model's
    support, does not fit the GPU or is one of several replicas.

    Args:
        job: the job.
        gpu: name or alias of the cluster's GPU, alone or with a MIG profile behind a slash.
        coverage: share of jobs that the safe amount shall cover.
        memory_resource: name of a custom resource that the cluster's nodes offer by MiB
            (``gpu_memory_mib``); it is asked for beside the share, for sites that count it.  It
            belongs to a node, so it counts rightly only where a node has one GPU.
        predictor: the :class:`~gpumemnet.predict.predictor.Predictor` to ask; that of the shipped
            bundles unless given.

    Raises:
        InvalidRequestError: on an unknown GPU or a coverage that the model is not calibrated for.
        UnsupportedJobError: when no model answers for the job's family.
    """
    chosen = target(gpu)
    asked = Predictor.default() if predictor is None else predictor
    estimate: Prediction = asked.predict(job, coverage=coverage, gpu=chosen.gpu)
    available_bytes = chosen.available_mib * MIB
    safe_bytes = estimate.safe_bytes
    reasons = estimate.reasons if safe_bytes is None else ()
    if job.is_replica:  # NCCL lets no two of them use one GPU
        reasons = (
            *reasons,
            f"it is one of {job.ranks} replicas, each of which needs a GPU of its own",
        )
    if safe_bytes is None or job.is_replica:
        share: float = 1
        taken_bytes = available_bytes
    elif safe_bytes > available_bytes:
        share, taken_bytes = 1, available_bytes
        needed_mib = ceil_mib(safe_bytes)
        reasons = (
            f"the job may take {needed_mib} MiB, more than the {chosen.available_mib} MiB that {chosen.gpu} has for it",
        )
    else:
        share = -(-safe_bytes * SHARES_PER_GPU // available_bytes) / SHARES_PER_GPU
        taken_bytes = safe_bytes
    options: dict[str, Any] = {"num_gpus": share}
    if memory_resource is not None:
        options["resources"] = {memory_resource: ceil_mib(taken_bytes)}
    return RayResources(options, estimate, available_bytes, reasons)
