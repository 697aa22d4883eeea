"""What cuDNN is asked, a convolution on a GPU, and what it answers: its execution plans with their
workspaces."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from gpumemnet.atomic_files import Document, shipped_json
from gpumemnet.gpu import DeviceProfile

FORWARD: Final = "forward"
BACKWARD_DATA: Final = "backward_data"
BACKWARD_FILTER: Final = "backward_filter"
OPERATIONS: Final = (FORWARD, BACKWARD_DATA, BACKWARD_FILTER)
TENSOR_CORE: Final = "tensor_core"
DOWN_CONVERTS_INPUTS: Final = "down_converts_inputs"
NOTES: Final = {
    0: TENSOR_CORE,
    1: DOWN_CONVERTS_INPUTS,
    3: "fft",
    4: "nondeterministic",
    5: "winograd",
}
"""Numerical notes of cuDNN that are kept, by their number in ``cudnnBackendNumericalNote_t``."""
ALIGNMENT_BYTES: Final = 16
"""PyTorch describes a tensor by the alignment of its address up to this; the allocator's blocks
begin at multiples of 512."""


@dataclass(frozen=True, kw_only=True)
class ConvolutionQuestion:
    """One operation of a convolution, as PyTorch describes it to cuDNN.

    Attributes:
        operation: one of :data:`OPERATIONS`.
        image, weight, result: shapes ``[batch, channels, *spatial]``, ``[outputs, channels per
            group, *filter]`` and ``[batch, outputs, *spatial]``, with two or three spatial
            dimensions.
        channels_last: whether all three tensors have this layout, or the contiguous one.
        dtype: type of the tensors: ``float32``, ``float16``, ``bfloat16`` or ``float64``.
        padding, stride, dilation: by spatial dimension.
    """

    operation: str
    image: tuple[int, ...]
    weight: tuple[int, ...]
    result: tuple[int, ...]
    channels_last: bool
    dtype: str
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]


@dataclass(frozen=True)
class ExecutionPlan:
    """One way to compute a convolution.

    Attributes:
        engine: number of the engine in cuDNN.
        workspace_bytes: memory that it needs while it runs.
        notes: what is special about its arithmetic, of :data:`NOTES`.
    """

    engine: int
    workspace_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class ExecutionPlans:
    """The supported plans of one operation, in the order in which PyTorch tries them.

    Attributes:
        heuristic: the plans that the heuristics (mode ``INSTANT``) rank.
        fallback: the plans of the fallback list.
    """

    heuristic: tuple[ExecutionPlan, ...]
    fallback: tuple[ExecutionPlan, ...]

    def for_pytorch(self, dtype: str, tf32: bool) -> tuple[ExecutionPlan, ...]:
        """Return the plans that PyTorch does not reject, heuristics first.

        It rejects plans that convert fp32 inputs to a shorter type, and, if TF32 is not allowed,
        tensor cores for fp32 (``filterEngineConfigs`` in
        ``aten/src/ATen/native/cudnn/Conv_v8.cpp``).
        """
        rejected = (
            set()
            if dtype != "float32"
            else {DOWN_CONVERTS_INPUTS}
            if tf32
            else {DOWN_CONVERTS_INPUTS, TENSOR_CORE}
        )
        return tuple(
            plan for plan in (*self.heuristic, *self.fallback) if not rejected & set(plan.notes)
        )


_tables: Final = partial(shipped_json, "cudnn/compute_capabilities.json")


def device_description(device: DeviceProfile) -> Document | None:
    """Return the properties of a GPU that cuDNN would otherwise read from the CUDA runtime, by cuDNN's
    names.

    What cuDNN answers depends on the compute capability; on 7.5 and 9.0 also on the other
    properties, the number of multiprocessors among them.

    Returns:
        ``None`` if the compute capability is not in ``compute_capabilities.json``.
    """
    tables = _tables()
    major, minor = device.compute_capability
    by_capability = tables["compute_capabilities"].get(f"{major}.{minor}")
    if by_capability is None:
        return None
    not_read = {name: value for name, value in tables["not_read"].items() if name != "comment"}
    return {
        "deviceVer": 100 * major + 10 * minor,
        "totalGlobalMem": device.capacity_bytes,
        "multiProcessorCount": device.multiprocessors,
        **by_capability,
        **tables["all"],
        **not_read,
    }
