"""The one interface of all estimators on the scoreboard: ``estimate(subject)`` gives bytes, their
parts, and the seconds it took.

An estimator sees of a subject only what its paper gives it, which :attr:`PublishedEstimator.needs`
names.  What it leaves out of a job's memory is part of its description, because most differences
between published estimators are differences of scope.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from gpumemnet.gpu import DeviceProfile, context, device_profile
from gpumemnet.job.measurement import Measurement
from gpumemnet.job.training_job import TrainingJob

if TYPE_CHECKING:
    from torch import nn

    from gpumemnet.extract.module_calls import ModelInputs
    from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.operators.rules import Platform

NEEDS: Final = ("totals", "layers", "module", "cpu run")
"""What an estimator may need, cheapest first: a job's totals, its layers, the model as a module, or
a run of it on a CPU."""
ABOVE_CONTEXT: Final = "above-context"
"""Protocol of readings that start when the CUDA context exists, so that the label does not hold
it."""


class NotCoveredError(Exception):
    """The estimator has no answer for this job; the text says why."""


class Training(Protocol):
    """A job as it can be run: what :mod:`research.traces.rebuilt` makes of a dataset's
    row."""

    @property
    def network(self) -> nn.Module:
        """The model, on meta tensors."""
        ...

    @property
    def inputs(self) -> ModelInputs:
        """What it is called with."""
        ...

    @property
    def options(self) -> TraceOptions:
        """How it is trained."""
        ...

    @property
    def platform(self) -> Platform:
        """What it runs on."""
        ...


@dataclass(slots=True, eq=False)
class Subject:
    """One job on one GPU, whose memory is to be estimated.

    Attributes:
        job: the job, with its layers.
        gpu: the GPU that it runs on.
        context_bytes: what an estimator adds for the CUDA context: the profile's, or 0 where
            readings start above it.
        architecture: parameters of the network that a job has no field for, such as the number of
            heads.
        build: makes the model; ``None`` where there is only the job.
    """

    job: TrainingJob
    gpu: DeviceProfile
    context_bytes: int
    architecture: Mapping[str, Any]
    build: Callable[[], Training] | None = None

    def training(self) -> Training:
        """Build the model and what it is trained with.

        Raises:
            NotCoveredError: there is only the job.
        """
        if self.build is None:
            raise NotCoveredError("the model itself is not at hand")
        return self.build()


def subject_of(
    row: Measurement,
    architecture: Mapping[str, Any],
    build: Callable[[Measurement, DeviceProfile], Training] | None = None,
) -> Subject:
    """The subject of a dataset's row.

    Args:
        row: the row; its label is not read.
        architecture: its ``architecture`` column, parsed.
        build: makes its model.
    """
    gpu = device_profile(row.gpu)
    context_bytes = 0 if row.protocol == ABOVE_CONTEXT else context(gpu).expected_bytes
    return Subject(
        row.job,
        gpu,
        context_bytes,
        architecture,
        None if build is None else lambda: build(row, gpu),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """One answer.

    Attributes:
        total_bytes: the estimated memory.
        parts: what it is made of, in bytes; they add up to it.
        seconds: wall-clock time of the estimate, the building of the model included where one is
            needed.
    """

    total_bytes: int
    parts: Mapping[str, int]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PublishedEstimator:
    """An estimator.

    Attributes:
        name: on the scoreboard.
        needs: the most that it needs, one of :data:`NEEDS`.
        leaves_out: what of a job's memory it does not count.
        source: paper or program that it follows.
        parts: computes the parts of the memory of a subject, in bytes; raises
            :class:`NotCoveredError` where it has no answer.
    """

    name: str
    needs: str
    leaves_out: str
    source: str
    parts: Callable[[Subject], Mapping[str, int]]

    def estimate(
        self, subject: Subject, clock: Callable[[], float] = time.perf_counter
    ) -> Estimate:
        """Estimate the memory of ``subject``.

        Raises:
            NotCoveredError: it has no answer for such a job.
        """
        start = clock()
        parts = {name: round(size) for name, size in self.parts(subject).items()}
        return Estimate(sum(parts.values()), parts, clock() - start)
