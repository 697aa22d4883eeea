"""What a parent asks a tracing child, as JSON: options, GPU, allocator and what is wanted beside.

The two halves stand side by side because they have to agree; neither loads torch.
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
from gpumemnet.tracing.options import DEFAULT_GPU, Questions, TraceOptions
from gpumemnet.tracing.parallel.plan import check_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked, besides the model.

    Attributes:
        options: how the model is trained.
        gpu: the GPU.
        allocator: settings of the caching allocator.
        questions: what else is wanted.
    """

    options: TraceOptions
    gpu: DeviceProfile
    allocator: AllocatorSettings
    questions: Questions


def asked(
    options: TraceOptions,
    gpu: str | DeviceProfile = DEFAULT_GPU,
    allocator: AllocatorSettings | None = None,
    questions: Questions | None = None,
    batch_size: int | None = None,
) -> Asked:
    """What is asked, checked.

    Args:
        options: how the model is trained, in words and numbers.
        gpu: name or alias of a GPU of the catalogue, path of a profile's ``.json`` file, or a profile.
        allocator: PyTorch's defaults unless given.
        questions: what else is wanted.
        batch_size: of the job, if it is known.

    Raises:
        InvalidJobError, InvalidRequestError: when a value is out of its limits, or there is no such GPU.
    """
    check_batch_size(batch_size)
    wanted = questions or Questions()
    check_plan(options, wanted.job)
    for size in wanted.batches:
        if type(size) is not int or size < 1:
            raise InvalidRequestError(f"must be at least 1, not {describe(size)}", "batches")
    profile = find_profile(gpu) if isinstance(gpu, str) else gpu
    return Asked(options=options, gpu=profile, allocator=allocator or AllocatorSettings(), questions=wanted)


def asked_to_dict(what: Asked) -> dict[str, Any]:
    """The JSON object of ``what``."""
    return asdict(what)


def asked_from_dict(document: Mapping[str, Any]) -> Asked:
    """What such an object asks."""
    gpu, allocator, questions = document["gpu"], document["allocator"], document["questions"]
    profile = {
        **gpu,
        "aliases": tuple(gpu["aliases"]),
        "compute_capability": tuple(gpu["compute_capability"]),
        "context_readings": tuple(ContextReading(**reading) for reading in gpu["context_readings"]),
    }
    return Asked(
        options=TraceOptions(**document["options"]),
        gpu=DeviceProfile(**profile),
        allocator=AllocatorSettings(**{**allocator, "roundup_power2_divisions": tuple(allocator["roundup_power2_divisions"])}),
        questions=Questions(**{**questions, "batches": tuple(questions["batches"])}),
    )
