"""What a parent asks a tracing child, as JSON: settings, GPU, allocator and what is wanted beside.

The two halves stand side by side because they have to agree; neither loads torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

from gpumemnet.allocator.settings import AllocatorSettings
from gpumemnet.errors import InvalidRequestError
from gpumemnet.extract.options import JobOptions, check_options
from gpumemnet.gpu.catalogue import ContextReading, DeviceProfile, find_profile
from gpumemnet.job.layers import describe
from gpumemnet.tracing.options import DEFAULT_GPU, LOSSES, ZERO_GRAD, Questions, TraceSettings
from gpumemnet.tracing.parallel.plan import check_plan

_OF_TRACE: Final[Mapping[str, tuple[str, ...]]] = {"loss": LOSSES, "zero_grad": ZERO_GRAD}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is asked, besides the model.

    Attributes:
        settings: how the model is trained; what is left out takes the default of
            :func:`~gpumemnet.tracing.model_trace.trace_model`.
        gpu: the GPU.
        allocator: settings of the caching allocator.
        questions: what else is wanted.
    """

    settings: TraceSettings
    gpu: DeviceProfile
    allocator: AllocatorSettings
    questions: Questions


def asked(
    settings: TraceSettings,
    gpu: str | DeviceProfile = DEFAULT_GPU,
    allocator: AllocatorSettings | None = None,
    questions: Questions | None = None,
    batch_size: int | None = None,
) -> Asked:
    """What is asked, checked.

    Args:
        settings: how the model is trained.
        gpu: name or alias of a GPU of the catalogue, path of a profile's ``.json`` file, or a profile.
        allocator: PyTorch's defaults unless given.
        questions: what else is wanted.
        batch_size: of the job, if it is known.

    Raises:
        InvalidJobError, InvalidRequestError: when a setting has no such value, or there is no such GPU.
    """
    values: dict[str, Any] = dict(settings)
    of_job = {name: value for name, value in values.items() if name in JobOptions.__annotations__ and value is not None}
    check_options(cast(JobOptions, {"optimizer": "adamw", "precision": "fp32", **of_job}), batch_size)
    for name, choices in _OF_TRACE.items():
        if values.get(name, choices[0]) not in choices:
            raise InvalidRequestError(f"must be one of {', '.join(choices)}, not {describe(values[name])}", name)
    wanted = questions or Questions()
    check_plan(values.get("parallel", "none"), values.get("ranks", 1), values.get("precision", "fp32"), wanted.job)
    for size in wanted.batches:
        if type(size) is not int or size < 1:
            raise InvalidRequestError(f"must be at least 1, not {describe(size)}", "batches")
    profile = find_profile(gpu) if isinstance(gpu, str) else gpu
    return Asked(settings=settings, gpu=profile, allocator=allocator or AllocatorSettings(), questions=wanted)


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
        settings=document["settings"],
        gpu=DeviceProfile(**profile),
        allocator=AllocatorSettings(**{**allocator, "roundup_power2_divisions": tuple(allocator["roundup_power2_divisions"])}),
        questions=Questions(**{**questions, "batches": tuple(questions["batches"])}),
    )
