"""GPUs: device profiles with the CUDA context, and the memory that a process can use.

A device profile says what a GPU model and its software stack add to a job's tensors.

The caching allocator reserves the same bytes on different GPUs and drivers; the CUDA context
differs.  A profile holds the GPU's numbers with a source for each; an unmeasured number is
``None``.  :func:`context` also estimates unmeasured contexts and names the source of its estimate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, get_args, get_origin

from gpumemnet.atomic_files import from_json, hints_of, shipped_json, stated_json
from gpumemnet.errors import InvalidRequestError, did_you_mean
from gpumemnet.job.layers import check_count, describe
from gpumemnet.units import MIB, ceil_mib


@dataclass(frozen=True, kw_only=True)
class ContextReading:
    """One reading of the CUDA context on a GPU model, published by others.

    Attributes:
        context_bytes: the process's memory outside the allocator.
        is_typical: whether the reading applies to current training jobs: of one process, with
            kernels loaded at first use (the default since CUDA 12.2).
        source: who read it, and for which program.
    """

    context_bytes: int
    is_typical: bool
    source: str


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """One GPU model.

    Attributes:
        name: the product name as NVML reports it; where NVML gives cards of different memory one
            name, the memory follows it.
        aliases: short names; the first is the shortest way to write the GPU.
        capacity_bytes: total memory.
        context_bytes: CUDA context with the libraries of a training job; ``None`` when not
            measured.
        blas_workspace_bytes: cuBLAS workspace per handle and stream, allocated through the caching
            allocator.
        compute_capability: major and minor version.
        multiprocessors: number of streaming multiprocessors, from the data sheet or the CUDA
            runtime; some kernels allocate memory for each.
        fp32_tflops, tf32_tflops, fp16_tflops: peak rates in 10**12 operations a second, without
            sparsity, from the maker's data sheets and architecture white papers; tf32 and fp16 on
            tensor cores, fp16 with fp32 sums.  ``None``: not listed.
        memory_gb_per_second: bandwidth of the GPU's memory in 10**9 bytes a second, from the same.
        host_link_gb_per_second: bandwidth of the link to the host in one direction, by the number
            and generation of its lanes.
        context_readings: readings of the context published by others; this project's own
            measurements are not among them.
        capacity_source, context_source, blas_workspace_source: source of each number.
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
    multiprocessors: int
    fp32_tflops: float | None = None
    tf32_tflops: float | None = None
    fp16_tflops: float | None = None
    memory_gb_per_second: float | None = None
    host_link_gb_per_second: float | None = None
    context_readings: tuple[ContextReading, ...] = ()

    @property
    def is_laptop(self) -> bool:
        """Whether it is a laptop's GPU: known by name, but left out where the GPUs that hold a job
        are listed."""
        return " Laptop" in self.name


@cache
def device_profiles() -> tuple[DeviceProfile, ...]:
    """All profiles of the catalogue ``catalogue.json``, in its order."""
    document = shipped_json("gpu/catalogue.json")
    return tuple(
        _read({**_unmeasured(entry["compute_capability"]), **entry}, f"devices[{index}]")
        for index, entry in enumerate(document["devices"])
    )


def _unmeasured(compute_capability: Sequence[int]) -> dict[str, Any]:
    """The fields of a profile that the catalogue leaves out, because no GPU of this project has
    measured them."""
    blas_workspace_bytes, source = (
        _LARGE_BLAS_WORKSPACE if compute_capability[0] >= 9 else _SMALL_BLAS_WORKSPACE
    )
    return {
        "context_bytes": None,
        "context_source": "unknown: not measured",
        "blas_workspace_bytes": blas_workspace_bytes,
        "blas_workspace_source": f"aten/src/ATen/cuda/CublasHandlePool.cpp: {source}",
    }


_SMALL_BLAS_WORKSPACE: Final = (8_519_680, "8.125 MiB below compute capability 9.0")
_LARGE_BLAS_WORKSPACE: Final = (
    32 * MIB,
    "32 MiB on compute capability 9, 10 and 12 in torch 2.13; 8.125 MiB above 9.0 in older versions",
)
GENERIC_BLAS_WORKSPACE_BYTES: Final = _SMALL_BLAS_WORKSPACE[0]
"""Assumed for a GPU without a profile: 8.125 MiB, as below compute capability 9.0."""


def blas_workspace_bytes(name: str) -> int:
    """The cuBLAS workspace per handle of the GPU ``name``; :data:`GENERIC_BLAS_WORKSPACE_BYTES` if
    it has no profile."""
    profile = known_profile(name)
    return GENERIC_BLAS_WORKSPACE_BYTES if profile is None else profile.blas_workspace_bytes


def known_profile(name: str) -> DeviceProfile | None:
    """The profile of the GPU called ``name``; ``None`` where the catalogue has none."""
    try:
        return device_profile(name)
    except InvalidRequestError:
        return None


def device_profile(name: str) -> DeviceProfile:
    """Looks up the profile of a GPU by its NVML name or an alias.

    Case, spaces, hyphens, underscores and the maker's words make no difference, so Slurm's
    ``nvidia_geforce_rtx_3090`` is known.

    Raises:
        InvalidRequestError: when there is none; the message names the most similar GPU, or explains
            why there is none.
    """
    if not isinstance(name, str):
        raise InvalidRequestError(f"must be the name of a GPU, not {describe(name)}", "gpu")
    return _profile_called(name[:_LONGEST_NAME])


_LONGEST_NAME: Final = 100
"""Longer names are cut: no GPU has one."""


@lru_cache(maxsize=512)
def _profile_called(name: str) -> DeviceProfile:
    by_name, key = _by_name(), _key(name)
    if key in by_name:
        return by_name[key][1]
    known_gpus = (
        "known are NVIDIA's GPUs from V100 and T4 to B300 and RTX 50, such as A100-80GB or RTX 4090; GET /v1/gpus lists them, "
        "and trace takes the path of a profile for any other"
    )
    names = [known for known, _ in by_name.values()]
    hint = did_you_mean(name, names, known_gpus, similarity=0.75, key=_key)
    raise InvalidRequestError(f"no profile of {describe(name)}: {hint}", "gpu")


_MAKER: Final = re.compile(r"^(nvidia|tesla|quadro|geforce|rtx)|(gpu|generation)$")
"""Words at a name's ends by which no two GPUs differ, once they are written without spaces."""


def _key(name: str) -> str:
    """The name's letters and digits in lower case, without the words of :data:`_MAKER`."""
    key = "".join(letter for letter in name.casefold() if letter.isalnum())
    while (shorter := _MAKER.sub("", key)) != key and shorter:
        key = shorter
    return key


@cache
def _by_name() -> dict[str, tuple[str, DeviceProfile]]:
    """Key of a name → the name as it is written, and its profile."""
    return {
        _key(name): (name, profile)
        for profile in device_profiles()
        for name in (profile.name, *profile.aliases)
    }


# The CUDA context.

GENERIC_CONTEXT_BYTES: Final = 450 * MIB
GENERIC_CONTEXT_BOUND_BYTES: Final = 600 * MIB
"""Contexts take 300 to 600 MiB when kernels are loaded at first use, the default since CUDA 12.2
and in PyTorch since 1.13. ``CUDA_MODULE_LOADING=EAGER`` loads all kernels and takes above 1 GiB.
PyTorch's maintainers read 274 MiB after one small tensor and 636 MiB with all kernels
(github.com/pytorch/pytorch/pull/86509).  They mention 300 (issue 107667) and 400 MiB (issue
109888)."""
MAX_CONTEXT_MIB: Final = 2**14
"""Upper limit of a context that a site may state, above that of any process; it catches amounts
given in bytes or KiB."""
CONTEXT_GROWTH_BYTES: Final = 64 * MIB
"""Assumed allowance for kernels that a job uses and the measured job did not; each kernel's first
use enlarges the context."""


@dataclass(frozen=True)
class ContextEstimate:
    """Estimated CUDA context of a training process.

    Attributes:
        expected_bytes: expected size.
        bound_bytes: largest known size plus an allowance for further kernels; not a guarantee.
        source: source of both numbers.
        advice: for an assumed context, what it leaves out and how to state the true one.
    """

    expected_bytes: int
    bound_bytes: int
    source: str
    advice: str = ""


def context(profile: DeviceProfile) -> ContextEstimate:
    """Estimates the CUDA context on a GPU: measured if known, else published for this model, else
    typical of all GPUs."""
    if profile.context_bytes is not None:
        return grown_context(profile.context_bytes, f"measured: {profile.context_source}")
    typical = [reading for reading in profile.context_readings if reading.is_typical]
    if not typical:
        expected, bound = GENERIC_CONTEXT_BYTES, GENERIC_CONTEXT_BOUND_BYTES
        found = f"not measured on {profile.name}: GPUs in general take 300 to 600 MiB with kernels loaded when first used"
    else:
        largest = max(typical, key=lambda reading: reading.context_bytes)
        expected = largest.context_bytes
        bound = max(GENERIC_CONTEXT_BOUND_BYTES, expected + CONTEXT_GROWTH_BYTES)
        found = f"published for drivers since CUDA 12.2, not measured here: {largest.source}"
    # A limit must not promise in silence what a driver that loads all kernels at once breaks by a
    # gigabyte.
    advice = (
        f"assumes a CUDA context of {expected // MIB:,} MiB, not the 1,024 MiB or more of drivers that load all kernels "
        "at once; state yours with GPUMEMNET_CONTEXT_MIB or --context-mib (what nvidia-smi shows for a process after one "
        "small training step, less torch.cuda.memory_reserved())"
    )
    return ContextEstimate(expected, bound, found, advice)


def grown_context(context_bytes: int, source: str) -> ContextEstimate:
    """A context that somebody has read, with room for kernels that a job uses beside it."""
    return ContextEstimate(context_bytes, context_bytes + CONTEXT_GROWTH_BYTES, source)


# The memory that a job can use on a GPU or MIG partition, and whether the job fits it.
#
# A job can use the total minus what the driver reserves.  A job fits if its safe memory is available.
# It does not fit if even its expected memory is not.  In between it may fit.
#
# The numbers in mig.json are readings published by others, each with its source.  Where readings
# differ, the file holds the smallest memory and the largest reserve, because a job with too little
# memory fails.  Profiles without a reading are left out.

GENERIC_RESERVED_MIB: Final = 768
"""Assumed driver reserve of a GPU without a published reading: the largest of the readings (A100 of
80 GB).  The readings lie between 267 and 768 MiB, so the assumption is conservative for a small
GPU."""

MIG_RESERVED_MIB: Final = 64
"""Assumed reserve of a MIG instance, the same for all profiles.  Published ``nvidia-smi`` listings
show 6 to 71 MiB used in idle instances, mostly below 40 (such as
github.com/XuehaiPan/nvitop/pull/8)."""


@dataclass(frozen=True, kw_only=True)
class MigProfile:
    """One kind of MIG instance of one GPU model.

    Attributes:
        name: profile name, such as ``3g.20gb``.
        memory_mib: memory of an instance in MiB; the profile name rounds it up to gigabytes.
        source: who published the reading.
    """

    name: str
    memory_mib: int
    source: str


@cache
def mig_profiles(gpu: str) -> tuple[MigProfile, ...]:
    """MIG profiles of the GPU with this product name, smallest first; empty if it has none or no
    reading is published."""
    return tuple(
        MigProfile(name=name, memory_mib=memory_mib, source=entry["source"])
        for entry in _catalogue()["partitions"]
        if gpu in entry["gpus"]
        for name, memory_mib in entry["profiles_mib"].items()
    )


def mig_profile(gpu: str, name: str) -> MigProfile:
    """Looks up the MIG profile ``name`` of the GPU with this product name, ignoring case.

    Raises:
        InvalidRequestError: when the profile is unknown; the message lists the GPU's profiles.
    """
    profiles = mig_profiles(gpu)
    for profile in profiles:
        if isinstance(name, str) and name.casefold() == profile.name:
            return profile
    known = ", ".join(profile.name for profile in profiles) or "none"
    raise InvalidRequestError(
        f"no MIG profile {describe(name)} of the {gpu} is known: known are {known}", "gpu"
    )


@cache
def reserve(gpu: str) -> tuple[int, str]:
    """The driver's reserve on the GPU with this product name in MiB, and its source: who published
    the reading, or that it is assumed."""
    for entry in _catalogue()["reserves"]:
        if entry["gpu"] == gpu:
            return entry["reserved_mib"], entry["source"]
    return GENERIC_RESERVED_MIB, "assumed: nobody has published a reading"


def available_mib(profile: DeviceProfile, mig: MigProfile | None = None) -> int:
    """Memory in whole MiB that one process can use on an empty GPU, or in an empty MIG instance of
    it."""
    whole = max(0, profile.capacity_bytes // MIB - reserve(profile.name)[0])
    return whole if mig is None else min(whole, mig.memory_mib - MIG_RESERVED_MIB)


def with_available(profile: DeviceProfile, available_bytes: int) -> DeviceProfile:
    """Returns ``profile`` with this much memory for one process, such as the budget of a plan;
    whole MiB are used."""
    return replace(profile, capacity_bytes=available_bytes + reserve(profile.name)[0] * MIB)


_catalogue: Final = partial(shipped_json, "gpu/mig.json")


YES: Final = "yes"
UNSURE: Final = "unsure"
NO: Final = "no"
UNKNOWN: Final = "unknown"

VERDICT_TEXTS: Final = MappingProxyType(
    {YES: "fits", UNSURE: "may not fit", NO: "does not fit", UNKNOWN: "unknown"}
)
"""Verdict → how a person reads it."""


def verdict(expected_mib: int, safe_mib: int | None, available_mib: int) -> str:
    """Compare a job's memory with the available memory.

    Args:
        expected_mib: expected memory of the job in MiB, rounded up.
        safe_mib: its upper bound in MiB, rounded up; ``None`` if there is none.
        available_mib: memory in MiB that the job can use, see
            :func:`available_mib`.

    Returns:
        ``yes``, ``unsure``, ``no``, or ``unknown`` without an upper bound.
    """
    if safe_mib is None:
        return UNKNOWN
    if safe_mib <= available_mib:
        return YES
    return NO if expected_mib > available_mib else UNSURE


def verdict_of(memory: Any, profile: DeviceProfile) -> str:
    """Return whether ``memory``, with ``expected_bytes`` and ``safe_bytes``, fits the GPU."""
    expected_mib, safe_mib = ceil_mib(memory.expected_bytes), ceil_mib(memory.safe_bytes)
    return verdict(expected_mib, safe_mib, available_mib(profile))


# Profiles written by users.

PROFILE_FORMAT: Final = "gpumemnet-device-profile"
PROFILE_VERSION: Final = 1
_LARGEST_RATE: Final = 1e6
"""Above that of any GPU; it catches rates given in operations or bytes a second."""


def load_profile(path: Path) -> DeviceProfile:
    """Reads a device profile from a file in the format of ``gpumemnet build probe``.

    Raises:
        InvalidRequestError: when the file cannot be read, or a field is missing, unknown or wrong;
            names the field.
    """
    document = stated_json(path, "gpu")
    if not isinstance(document, dict) or document.get("format") != PROFILE_FORMAT:
        raise InvalidRequestError(
            f"{path} is no device profile: its 'format' must be '{PROFILE_FORMAT}'", "gpu"
        )
    if document.get("version") != PROFILE_VERSION:
        raise InvalidRequestError(
            f"{path} has version {describe(document.get('version'))}, and this gpumemnet reads {PROFILE_VERSION}",
            "gpu",
        )
    if document.get("provenance", "measured") != "measured":
        raise InvalidRequestError(
            f"{path} was not measured on a GPU: it comes from a rehearsal", "gpu"
        )
    return _read(document.get("profile"), "profile")


def find_profile(gpu: str | DeviceProfile) -> DeviceProfile:
    """Finds a profile by the name of a GPU in the catalogue, or by the path of a ``.json`` file; a
    profile stays as it is.

    Raises:
        InvalidRequestError: as :func:`device_profile` and :func:`load_profile`.
    """
    if isinstance(gpu, DeviceProfile):
        return gpu
    return load_profile(Path(gpu)) if gpu.endswith(".json") else device_profile(gpu)


def asked_profile(gpu: str | DeviceProfile, context_mib: int | None, option: str) -> DeviceProfile:
    """Return the profile of the GPU that a user asks for, with the context that the user knows, if
    any.

    Args:
        gpu: a profile, the name of a GPU in the catalogue, or the path of a ``.json`` file.
        context_mib: CUDA context of a process in MiB; the profile's if ``None``.
        option: name of the option that gives the context, for errors.

    Raises:
        InvalidRequestError: as :func:`find_profile`.
        InvalidJobError: there is no such context.
    """
    profile = find_profile(gpu)
    if context_mib is None:
        return profile
    check_count(context_mib, option, 0, MAX_CONTEXT_MIB)
    return replace(
        profile, context_bytes=context_mib * MIB, context_source=f"{context_mib:,} MiB, by {option}"
    )


def _read(entry: Any, place: str) -> DeviceProfile:
    """Reads a profile from its JSON object, and checks its numbers."""
    hints = hints_of(DeviceProfile)
    try:
        for name in entry.keys() - hints.keys():
            raise TypeError(f"{describe(name)} is not a field: known are {', '.join(hints)}")
        profile: DeviceProfile = from_json(DeviceProfile, entry)
    except (TypeError, AttributeError) as error:
        raise InvalidRequestError(f"is no device profile: {error}", place) from None
    for name, hint in hints.items():
        value, kinds = getattr(profile, name), (int, *get_args(hint))
        if hint is str and not (value and isinstance(value, str)):
            raise InvalidRequestError(f"must be a text, not {describe(value)}", f"{place}.{name}")
        if hint is str or get_origin(hint) is tuple:
            continue
        most = _LARGEST_RATE if float in kinds else math.inf
        if type(value) not in kinds or not (value is None or 0 < value < most):
            raise InvalidRequestError(
                f"must be a number above 0, not {describe(value)}", f"{place}.{name}"
            )
    return profile
