"""Decides which GPUs hold a job: of the catalogue with its MIG profiles, or of a site's devices
with their free memory.

The rule is that of :mod:`gpumemnet.gpu`.  Targets on which a job takes the same memory
share one prediction.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gpumemnet.gpu import (
    available_mib,
    device_profile,
    device_profiles,
    mig_profile,
    mig_profiles,
    verdict,
)
from gpumemnet.job.job_table import Array, JobTable
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.distribution import BinScheme
from gpumemnet.units import MIB, ceil_mib

if TYPE_CHECKING:
    from gpumemnet.predict.prediction import PredictionTable
    from gpumemnet.predict.predictor import Predictor

MAX_FREE_MIB: Final = 2**20
"""Upper limit of free memory, above that of any GPU; it catches amounts given in bytes or KiB."""
MAX_DEVICE_NAME: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A GPU or MIG partition that a job may run on.

    Attributes:
        gpu: product name of the GPU.
        mig: MIG profile; ``None`` for a whole GPU.
        device: the caller's name of the device (index, UUID); ``None`` for any device of this kind.
        available_mib: memory that a process can use there, in MiB.
    """

    gpu: str
    mig: str | None = None
    device: str | None = None
    available_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit(Target):
    """Whether a job fits a target.

    Attributes:
        request_mib: expected memory on this GPU in MiB, rounded up.
        limit_mib: safe memory on this GPU in MiB, rounded up; ``None`` outside the model's support.
        verdict: ``yes`` if the limit is available, ``no`` if even the request is not, ``unsure`` in
            between, ``unknown`` if there is no limit.
        probability: predicted probability that the job's memory is at most the available memory.
    """

    request_mib: int
    limit_mib: int | None
    verdict: str
    probability: float


@cache
def catalogue_targets() -> tuple[Target, ...]:
    """Every GPU of the catalogue but those of laptops, each followed by its MIG profiles."""
    return tuple(
        target(f"{profile.name}{mig}")
        for profile in device_profiles()
        if not profile.is_laptop
        for mig in ("", *(f"/{each.name}" for each in mig_profiles(profile.name)))
    )


def target(name: str, *, free_mib: int | None = None, device: str | None = None) -> Target:
    """Looks up a target by the name that a user gives.

    Args:
        name: name or alias of a GPU in the catalogue, optionally with a slash and a MIG profile
            (``A100/3g.20gb``).
        free_mib: memory that is free now, in MiB; by default that of an empty device.
        device: the caller's name of the device.

    Raises:
        InvalidRequestError: when the GPU or profile is not in the catalogue.
    """
    gpu, slash, profile_name = name.partition("/")
    profile = device_profile(gpu)
    mig = mig_profile(profile.name, profile_name) if slash else None
    available = available_mib(profile, mig) if free_mib is None else free_mib
    return Target(
        gpu=profile.name, mig=mig.name if mig else None, device=device, available_mib=available
    )


def fits(
    predictor: Predictor,
    job: TrainingJob,
    targets: Iterable[Target] | None = None,
    **options: Any,
) -> tuple[Fit, ...]:
    """Decides whether ``job`` fits each target, in the order of the targets.

    Args:
        predictor: the predictor.
        job: the job.
        targets: the targets; by default the whole catalogue.
        options: ``coverage`` and ``encoder``, see
            :class:`~gpumemnet.predict.prediction.PredictionOptions`.

    Raises:
        InvalidRequestError, UnsupportedJobError: as
            :meth:`gpumemnet.predict.predictor.Predictor.predict`.
    """
    return fits_table(predictor, JobTable.from_jobs((job,)), targets, **options)[0]


def fits_table(
    predictor: Predictor,
    jobs: JobTable,
    targets: Iterable[Target] | None = None,
    **options: Any,
) -> list[tuple[Fit, ...]]:
    """Runs :func:`fits` for all jobs of a table, in order, in batches; arguments and errors as in
    :func:`fits`."""
    all_targets = catalogue_targets() if targets is None else tuple(targets)
    found: list[dict[int, Fit]] = [{} for _ in range(len(jobs))]
    for gpu, positions in alike(predictor, all_targets).items():
        amounts = sorted({all_targets[position].available_mib for position in positions})
        edges = AvailableMemory.of(amounts)
        predictions = predictor.predict_table(jobs, bins=edges, gpu=gpu, **options)
        below = np.minimum(np.cumsum(predictions.probabilities, axis=1), 1.0).tolist()
        for row, memory in enumerate(memories_of(predictions)):
            for position in positions:
                asked = all_targets[position]
                edge = bisect_left(amounts, asked.available_mib)
                found[row][position] = judged(asked, memory, below[row][edge])
    return [tuple(answers[position] for position in range(len(all_targets))) for answers in found]


class Memory(NamedTuple):
    """Request and limit of a job on one GPU, in whole MiB; the limit is ``None`` outside the
    support."""

    request_mib: int
    limit_mib: int | None


def memories_of(predictions: PredictionTable) -> list[Memory]:
    """Request and limit of each prediction, in whole MiB."""
    limits = predictions.safe_bytes.tolist()
    return [
        Memory(ceil_mib(expected), None if limit is None else ceil_mib(limit))
        for expected, limit in zip(predictions.expected_bytes.tolist(), limits, strict=True)
    ]


def alike(predictor: Predictor, targets: Sequence[Target]) -> dict[str, list[int]]:
    """Groups targets on which a job takes the same memory: name of one GPU of the group → positions
    of its targets.

    Predicted memory differs between GPUs only by the CUDA context and the cuBLAS workspace.  A GPU
    that a site has calibrated is a group by itself.
    """
    leaders: dict[object, str] = {}
    groups: dict[str, list[int]] = {}
    for position, target in enumerate(targets):
        gpu = predictor.prediction_gpu(target.gpu)
        site = gpu.gpu if gpu.is_calibrated else None
        overheads = gpu.context.expected_bytes, gpu.context.bound_bytes, gpu.blas_workspace_bytes
        leader = leaders.setdefault((*overheads, site), target.gpu)
        groups.setdefault(leader, []).append(position)
    return groups


def judged(target: Target, memory: Memory, probability: float) -> Fit:
    """Whether a job of this memory fits the target."""
    return Fit(
        gpu=target.gpu,
        mig=target.mig,
        device=target.device,
        available_mib=target.available_mib,
        request_mib=memory.request_mib,
        limit_mib=memory.limit_mib,
        verdict=verdict(memory.request_mib, memory.limit_mib, target.available_mib),
        probability=probability,
    )


@dataclass(frozen=True, slots=True)
class AvailableMemory(BinScheme):
    """Bins of unequal width whose edges are amounts of available memory, so that one prediction
    covers all of them.

    Attributes:
        amounts_mib: the inner edges in MiB, increasing.
    """

    amounts_mib: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Leave out the check of the class above: there may be more of them than a response holds."""

    @classmethod
    def of(cls, amounts_mib: Sequence[int]) -> AvailableMemory:
        """Creates the bins between the given amounts in MiB."""
        return cls(MIB, len(amounts_mib) + 1, tuple(amounts_mib))

    @property
    def log_inner_edges(self) -> Array:
        """The inner edges in ``log(bytes)``; an amount of 0 counts as one byte."""
        return np.log(np.maximum(np.array(self.amounts_mib, dtype=np.float64) * MIB, 1.0))
