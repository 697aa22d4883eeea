"""The parts of a traced run that a dataset keeps, by the names of
:data:`gpumemnet.job.measurement.TRACED_PARTS`."""

from __future__ import annotations

from collections.abc import Mapping

from gpumemnet.gpu.catalogue import DeviceProfile
from gpumemnet.tracing.memory import steady_run
from gpumemnet.tracing.timeline import Timeline


def traced_parts(
    timeline: Timeline, largest: Mapping[str, int], device: DeviceProfile
) -> dict[str, int]:
    """The parts of ``timeline`` on ``device``, in bytes, without the CUDA context.

    Args:
        timeline: the run at one batch size.
        largest: the largest piece of scratch memory of each kind, as
            :meth:`~research.traces.batch_scaling.ScalableRun.at` returns it.
        device: the GPU.
    """
    memory = steady_run(timeline, device)
    return {
        "steady_reserved_bytes": memory.reserved_bytes,
        "startup_peak_reserved_bytes": memory.startup_peak_reserved_bytes,
        "steady_allocated_bytes": memory.allocated_bytes,
        "largest_convolution_workspace_bytes": largest.get("convolution", 0),
        "largest_convolution_search_bytes": largest.get("convolution_benchmark", 0),
    }
