"""Our own estimators in the form of the scoreboard: the closed form, the trace as the datasets keep
it, and the trace run anew.

The run gives the trace's seconds and its safe bytes, and how much less memory the job would have
done with.  That is the difference between what the simulated allocator reserves without a limit and
its smallest limit; :mod:`.protocol` needs it for failures.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpumemnet.allocator import AllocatorSettings
from gpumemnet.gpu import context
from gpumemnet.job.job_table import JobTable
from gpumemnet.predict.features import FEATURE_NAMES
from gpumemnet.tracing.timeline import memory_of, non_allocator_memory, repeated, smallest_bytes
from gpumemnet.tracing.training_loop import record
from models.training.data import features_on
from research.estimators.estimator import NotCoveredError, PublishedEstimator, Subject

_SEGMENT: Final = FEATURE_NAMES.index("segment_bytes")


def closed_form_parts(subject: Subject) -> Mapping[str, int]:
    """The closed form as it is, with nothing fitted, and the context."""
    features = features_on(np.array([subject.gpu.name]), JobTable.from_jobs([subject.job]))
    return {
        "closed form": round(float(np.asarray(features)[0, _SEGMENT])),
        "context": subject.context_bytes,
    }


def kept_trace_parts(subject: Subject) -> Mapping[str, int]:
    """The traced reserved bytes that the dataset keeps of the job, and the context."""
    if subject.job.traced_peak_bytes is None:
        raise NotCoveredError("the job has not been traced")
    return {"reserved": subject.job.traced_peak_bytes, "context": subject.context_bytes}


@dataclass(frozen=True, slots=True)
class TracedRun:
    """What a trace says of a job.

    Attributes:
        expected_bytes, safe_bytes: its answer and its upper bound.  Where readings start above the
            context, the profile's context is taken off both.
        spare_bytes: how much less the job would have done with.
        seconds: the answer took, without the search for the smallest limit.
    """

    expected_bytes: int
    safe_bytes: int
    spare_bytes: int
    seconds: float


def traced_run(subject: Subject) -> TracedRun:
    """Trace ``subject`` anew."""
    start = time.perf_counter()
    training = subject.training()
    timeline = record(
        training.network, training.inputs, training.options, training.platform
    ).timeline
    run, device, settings = repeated(timeline), training.platform.device, AllocatorSettings()
    memory = memory_of(run, device, settings)
    seconds = time.perf_counter() - start
    smallest = (
        smallest_bytes(run, device, settings) - non_allocator_memory(device, ()).expected_bytes
    )
    reserved = memory.replayed.reserved_bytes
    safe = memory.safe_bytes - (0 if subject.context_bytes else context(device).expected_bytes)
    return TracedRun(reserved + subject.context_bytes, safe, max(reserved - smallest, 0), seconds)


CLOSED_FORM: Final = PublishedEstimator(
    name="gpumemnet, closed form",
    needs="layers",
    leaves_out="nothing on purpose",
    source="gpumemnet.physics.closed_form",
    parts=closed_form_parts,
)
TRACE: Final = PublishedEstimator(
    name="gpumemnet, trace",
    needs="module",
    leaves_out="nothing on purpose",
    source="gpumemnet.trace, as kept in the dataset",
    parts=kept_trace_parts,
)
