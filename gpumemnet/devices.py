"""Device profiles: what a GPU model and its software stack add to a job's own tensors.

The caching allocator's reserved bytes travel between GPUs and drivers; the CUDA context does not.  A profile holds what
belongs to the GPU, and says of every number where it comes from; what nobody has measured is ``None``, never a guess.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources

from gpumemnet.errors import InvalidRequestError
from gpumemnet.layers import describe


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One GPU model.

    Attributes:
        name: the product name as NVML reports it.
        aliases: short names that users type.
        capacity_bytes: total memory.
        context_bytes: CUDA context with the libraries of a training job, or ``None`` where it has not been measured.
        blas_workspace_bytes: cuBLAS workspace per handle and stream, allocated through the caching allocator.
        compute_capability: major and minor.
        capacity_source, context_source, blas_workspace_source: where each number comes from.
    """

    name: str
    aliases: tuple[str, ...]
    capacity_bytes: int
    capacity_source: str
    context_bytes: int | None
    context_source: str
    blas_workspace_bytes: int
    blas_workspace_source: str
    compute_capability: tuple[int, int]


@cache
def device_profiles() -> tuple[DeviceProfile, ...]:
    """All known profiles, in the order of the catalogue ``devices.json``."""
    document = json.loads(resources.files("gpumemnet").joinpath("devices.json").read_text("utf-8"))
    return tuple(
        DeviceProfile(**{**entry, "aliases": tuple(entry["aliases"]), "compute_capability": tuple(entry["compute_capability"])})
        for entry in document["devices"]
    )


GENERIC_BLAS_WORKSPACE_BYTES = 8_519_680
"""Assumed for a GPU without a profile: 8.125 MiB, as below compute capability 9.0."""


def blas_workspace_bytes(name: str) -> int:
    """The cuBLAS workspace per handle of the GPU called ``name``, or :data:`GENERIC_BLAS_WORKSPACE_BYTES` without a profile."""
    try:
        return device_profile(name).blas_workspace_bytes
    except InvalidRequestError:
        return GENERIC_BLAS_WORKSPACE_BYTES


def device_profile(name: str) -> DeviceProfile:
    """The profile of a GPU by its NVML name or an alias; case does not matter.

    Raises:
        InvalidRequestError: lists the known names.
    """
    wanted = name.casefold() if isinstance(name, str) else None
    for profile in device_profiles():
        if wanted in (profile.name.casefold(), *(alias.casefold() for alias in profile.aliases)):
            return profile
    known = ", ".join(profile.aliases[0] for profile in device_profiles())
    raise InvalidRequestError(f"no profile of {describe(name)}: known GPUs are {known}", "gpu")
