"""Device profiles: what a GPU model and its software stack add to a job's own tensors.

The caching allocator's reserved bytes travel between GPUs and drivers; the CUDA context does not.  A profile holds what
belongs to the GPU, and says of every number where it comes from; what nobody has measured is ``None``, never a guess.
:func:`context` answers all the same, and says what its answer rests on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextReading:
    """One published reading of the CUDA context on a GPU model, on somebody else's machine.

    Attributes:
        context_bytes: the process's memory outside the allocator.
        is_typical: whether a training job of today is like it: read of the process alone, kernels loaded when first used.
        source: who read it, of what.
    """

    context_bytes: int
    is_typical: bool
    source: str


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
        multiprocessors: streaming multiprocessors, by the data sheet or the CUDA runtime; some kernels take memory for each.
        context_readings: what others have published of the context; never a measurement of ours.
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
    multiprocessors: int
    context_readings: tuple[ContextReading, ...] = ()


@cache
def device_profiles() -> tuple[DeviceProfile, ...]:
    """All known profiles, in the order of the catalogue ``catalogue.json``."""
    document = json.loads(resources.files("gpumemnet").joinpath("gpu/catalogue.json").read_text("utf-8"))
    return tuple(_profile(entry, f"devices[{index}]") for index, entry in enumerate(document["devices"]))


GENERIC_BLAS_WORKSPACE_BYTES: Final = 8_519_680
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
        InvalidRequestError: names the most similar GPU, or lists all.
    """
    wanted = name.casefold() if isinstance(name, str) else None
    for profile in device_profiles():
        if wanted in (profile.name.casefold(), *(alias.casefold() for alias in profile.aliases)):
            return profile
    names = {alias.casefold(): alias for profile in device_profiles() for alias in (*profile.aliases, profile.name)}
    if wanted is not None and (close := get_close_matches(wanted[:60], names, n=1, cutoff=0.75)):
        raise InvalidRequestError(f"no profile of {describe(name)}: did you mean '{names[close[0]]}'?", "gpu")
    known = ", ".join(profile.aliases[0] for profile in device_profiles())
    raise InvalidRequestError(f"no profile of {describe(name)}: known GPUs are {known}", "gpu")


# The CUDA context.

GENERIC_CONTEXT_BYTES: Final = 450 * MIB
GENERIC_CONTEXT_BOUND_BYTES: Final = 600 * MIB
"""300 to 600 MiB where kernels are loaded when first used, the default since CUDA 12.2 and in PyTorch since 1.13; above 1 GiB
where ``CUDA_MODULE_LOADING=EAGER`` loads all of them.  PyTorch's maintainers read 274 MiB after one small tensor, 636 MiB with
all kernels (github.com/pytorch/pytorch/pull/86509), and speak of 300 (issue 107667) and 400 MiB (issue 109888)."""
CONTEXT_GROWTH_BYTES: Final = 64 * MIB
"""Assumed room for kernels that a job uses and the reading's own job did not; the context grows with each kernel's first use."""


@dataclass(frozen=True, slots=True)
class ContextEstimate:
    """What the CUDA context of a training process takes, and on what that rests.

    Attributes:
        expected_bytes: likely.
        bound_bytes: the most that is known of it, with room for further kernels; not a guarantee.
        source: where both come from.
    """

    expected_bytes: int
    bound_bytes: int
    source: str


def context(profile: DeviceProfile) -> ContextEstimate:
    """The CUDA context on a GPU: measured where it was, else as published for the model, else as on GPUs in general."""
    if profile.context_bytes is not None:
        bound = profile.context_bytes + CONTEXT_GROWTH_BYTES
        return ContextEstimate(profile.context_bytes, bound, f"measured: {profile.context_source}")
    typical = [reading for reading in profile.context_readings if reading.is_typical]
    if not typical:
        source = f"not measured on {profile.name}: GPUs in general take 300 to 600 MiB with kernels loaded when first used"
        return ContextEstimate(GENERIC_CONTEXT_BYTES, GENERIC_CONTEXT_BOUND_BYTES, source)
    largest = max(typical, key=lambda reading: reading.context_bytes)
    bound = max(GENERIC_CONTEXT_BOUND_BYTES, largest.context_bytes + CONTEXT_GROWTH_BYTES)
    return ContextEstimate(largest.context_bytes, bound, f"published, not measured here: {largest.source}")


# Profiles of one's own.

PROFILE_FORMAT: Final = "gpumemnet-device-profile"
PROFILE_VERSION: Final = 1
_MAX_FILE_BYTES: Final = 2**20
_COUNTS: Final = ("capacity_bytes", "blas_workspace_bytes", "multiprocessors")


def load_profile(path: Path) -> DeviceProfile:
    """The profile in a file that ``gpumemnet build probe-device`` has written, or that has its form.

    Raises:
        InvalidRequestError: when there is no such file, or names the field that is missing, unknown or wrong.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}", "gpu") from None
    if len(text) > _MAX_FILE_BYTES:
        raise InvalidRequestError(f"{path} is larger than {_MAX_FILE_BYTES} bytes: no device profile", "gpu")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidRequestError(f"{path} is no JSON file", "gpu") from None
    if not isinstance(document, dict) or document.get("format") != PROFILE_FORMAT:
        raise InvalidRequestError(f"{path} is no device profile: its 'format' must be '{PROFILE_FORMAT}'", "gpu")
    if document.get("version") != PROFILE_VERSION:
        raise InvalidRequestError(
            f"{path} has version {describe(document.get('version'))}, and this gpumemnet reads {PROFILE_VERSION}", "gpu"
        )
    if document.get("provenance", "measured") != "measured":
        raise InvalidRequestError(f"{path} was not measured on a GPU: it comes from a rehearsal", "gpu")
    return _profile(document.get("profile"), "profile")


def find_profile(name_or_path: str) -> DeviceProfile:
    """A profile as a user names it: a GPU of the catalogue, or the path of a ``.json`` file.

    Raises:
        InvalidRequestError: as :func:`device_profile` and :func:`load_profile` do.
    """
    return load_profile(Path(name_or_path)) if name_or_path.endswith(".json") else device_profile(name_or_path)


def _profile(entry: object, place: str) -> DeviceProfile:
    """A profile from its JSON object, every field checked."""
    values = _fields(entry, DeviceProfile, place)
    for name in ("name", "capacity_source", "context_source", "blas_workspace_source"):
        _check(isinstance(values[name], str) and values[name], f"{place}.{name}", "a text", values[name])
    for name in _COUNTS:
        _check(_is_count(values[name], 1), f"{place}.{name}", "a whole number above 0", values[name])
    measured = values["context_bytes"]
    _check(measured is None or _is_count(measured, 1), f"{place}.context_bytes", "a whole number above 0, or null", measured)
    aliases = values["aliases"]
    is_names = isinstance(aliases, list) and all(isinstance(alias, str) and alias for alias in aliases)
    _check(is_names, f"{place}.aliases", "a list of names", aliases)
    capability = values["compute_capability"]
    is_version = isinstance(capability, list) and len(capability) == 2 and all(_is_count(number, 0) for number in capability)
    _check(is_version, f"{place}.compute_capability", "two whole numbers such as [9, 0]", capability)
    readings = values.get("context_readings", [])
    _check(isinstance(readings, list), f"{place}.context_readings", "a list", readings)
    return DeviceProfile(
        **{
            **values,
            "aliases": tuple(aliases),
            "compute_capability": tuple(capability),
            "context_readings": tuple(
                _reading(reading, f"{place}.context_readings[{index}]") for index, reading in enumerate(readings)
            ),
        }
    )


def _reading(entry: object, place: str) -> ContextReading:
    values = _fields(entry, ContextReading, place)
    _check(_is_count(values["context_bytes"], 1), f"{place}.context_bytes", "a whole number above 0", values["context_bytes"])
    _check(isinstance(values["is_typical"], bool), f"{place}.is_typical", "true or false", values["is_typical"])
    _check(isinstance(values["source"], str) and values["source"], f"{place}.source", "a text", values["source"])
    return ContextReading(**values)


def _fields(entry: object, kind: Any, place: str) -> dict[str, Any]:
    """The object's fields: all that ``kind`` requires, and none that it does not know."""
    if not isinstance(entry, Mapping):
        raise InvalidRequestError(f"must be an object, not {describe(entry)}", place)
    known: Sequence[str] = [field.name for field in fields(kind)]
    for name in entry:
        if name not in known:
            raise InvalidRequestError(f"is not a field: known fields are {', '.join(known)}", f"{place}.{ascii(name)[1:-1][:64]}")
    for field in fields(kind):
        if field.default is MISSING and field.name not in entry:
            raise InvalidRequestError("is missing", f"{place}.{field.name}")
    return dict(entry)


def _is_count(value: object, minimum: int) -> bool:
    return type(value) is int and value >= minimum


def _check(is_right: object, place: str, wanted: str, value: object) -> None:
    if not is_right:
        raise InvalidRequestError(f"must be {wanted}, not {describe(value)}", place)
