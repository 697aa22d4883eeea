"""The request from a parent process to the child that traces: options, GPU, allocator and extra results, as JSON.

Writer and reader are in one module, because they must agree.  Neither loads torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpumemnet.allocator.settings import AllocatorSettings
from gpumemnet.errors import InvalidRequestError
from gpumemnet.extract.options import check_batch_size
from gpumemnet.gpu.catalogue import ContextReading, DeviceProfile, find_profile
from gpumemnet.job.layers import describe
from gpumemnet.tracing.options import DEFAULT_GPU, ExtraResults, TraceOptions
from gpumemnet.tracing.parallel.plan import check_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """What a child process is to trace, except for the model.

    Attributes:
        options: how the model is trained; its values are words, numbers or switches.
        gpu: the GPU.
        allocator: settings of the caching allocator.
        extras: further results to compute.
    """

    options: TraceOptions
    gpu: DeviceProfile
    allocator: AllocatorSettings
    extras: ExtraResults


def checked_request(
    options: TraceOptions,
    gpu: str | DeviceProfile = DEFAULT_GPU,
    allocator: AllocatorSettings | None = None,
    extras: ExtraResults | None = None,
    batch_size: int | None = None,
) -> TraceRequest:
    """Check what does not go together, and return the request.

    Args:
        options: how the model is trained.
        gpu: name or alias of a GPU in the catalogue, path of a profile's ``.json`` file, or a profile.
        allocator: settings of the caching allocator; PyTorch's defaults by default.
        extras: further results to compute.
        batch_size: batch size of the job, if it is known.

    Raises:
        InvalidJobError: the batch size is out of range.
        InvalidRequestError: options exclude each other, or there is no such GPU.
    """
    check_batch_size(batch_size)
    extras = extras or ExtraResults()
    check_plan(options, extras.job)
    for size in extras.batches:
        if type(size) is not int or size < 1:
            raise InvalidRequestError(f"must be at least 1, not {describe(size)}", "batches")
    profile = find_profile(gpu) if isinstance(gpu, str) else gpu
    return TraceRequest(options=options, gpu=profile, allocator=allocator or AllocatorSettings(), extras=extras)


def request_to_dict(request: TraceRequest) -> dict[str, Any]:
    """Return the JSON object of ``request``."""
    return asdict(request)


def request_from_dict(document: Mapping[str, Any]) -> TraceRequest:
    """Return the request of a JSON object from :func:`request_to_dict`."""
    gpu, allocator, extras = document["gpu"], document["allocator"], document["extras"]
    profile = {
        **gpu,
        "aliases": tuple(gpu["aliases"]),
        "compute_capability": tuple(gpu["compute_capability"]),
        "context_readings": tuple(ContextReading(**reading) for reading in gpu["context_readings"]),
    }
    return TraceRequest(
        options=TraceOptions(**document["options"]),
        gpu=DeviceProfile(**profile),
        allocator=AllocatorSettings(**{**allocator, "roundup_power2_divisions": tuple(allocator["roundup_power2_divisions"])}),
        extras=ExtraResults(**{**extras, "batches": tuple(extras["batches"])}),
    )
