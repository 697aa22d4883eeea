"""The memory that a job can use on a GPU or MIG partition, and whether the job fits it.

A job can use the total minus what the driver reserves.  A job fits if its safe memory is available.
It does not fit if even its expected memory is not.  In between it may fit.

The numbers in ``mig.json`` are readings published by others, each with its source.  Where readings
differ, the file holds the smallest memory and the largest reserve, because a job with too little
memory fails.  Profiles without a reading are left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.gpu.catalogue import DeviceProfile, device_profile
from gpumemnet.job.layers import describe
from gpumemnet.units import MIB

GENERIC_RESERVED_MIB: Final = 768
"""Assumed driver reserve of a GPU without a published reading: the largest of the readings (A100 of
80 GB).  The readings lie between 267 and 768 MiB, so the assumption is conservative for a small
GPU."""

MIG_RESERVED_MIB: Final = 64
"""Assumed reserve of a MIG instance, the same for all profiles.  Published ``nvidia-smi`` listings
show 6 to 71 MiB used in idle instances, mostly below 40 (such as
github.com/XuehaiPan/nvitop/pull/8)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigProfile:
    """One kind of MIG instance of one GPU model.

    Attributes:
        gpu: product name of the GPU.
        name: profile name, such as ``3g.20gb``.
        memory_mib: memory of an instance in MiB; the profile name rounds it up to gigabytes.
        source: who published the reading.
    """

    gpu: str
    name: str
    memory_mib: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Memory of a GPU that the driver reserves.

    Attributes:
        reserved_mib: the reserve in MiB.
        source: who published the reading, or that it is assumed.
    """

    reserved_mib: int
    source: str


@cache
def mig_profiles(gpu: str) -> tuple[MigProfile, ...]:
    """MIG profiles of the GPU with this product name, smallest first; empty if it has none or no
    reading is published."""
    return tuple(
        MigProfile(gpu=gpu, name=name, memory_mib=memory_mib, source=entry["source"])
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
        f"no MIG profile {describe(name)} of the {gpu} is known: known are {known}", "mig"
    )


@cache
def reserve(gpu: str) -> Reserve:
    """The driver's reserve on the GPU with this product name: a published reading, else an
    assumption."""
    for entry in _catalogue()["reserves"]:
        if entry["gpu"] == gpu:
            return Reserve(reserved_mib=entry["reserved_mib"], source=entry["source"])
    return Reserve(
        reserved_mib=GENERIC_RESERVED_MIB, source="assumed: nobody has published a reading"
    )


def available_mib(profile: DeviceProfile, mig: MigProfile | None = None) -> int:
    """Memory in whole MiB that one process can use on an empty GPU, or in an empty MIG instance of
    it."""
    whole = max(0, profile.capacity_bytes // MIB - reserve(profile.name).reserved_mib)
    return whole if mig is None else min(whole, mig.memory_mib - MIG_RESERVED_MIB)


def with_available(profile: DeviceProfile, available_bytes: int) -> DeviceProfile:
    """Returns ``profile`` with this much memory for one process, such as the budget of a plan;
    whole MiB are used."""
    return replace(
        profile, capacity_bytes=available_bytes + reserve(profile.name).reserved_mib * MIB
    )


@cache
def _catalogue() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        resources.files("gpumemnet").joinpath("gpu/mig.json").read_text("utf-8")
    )
    for entry in (
        *document["partitions"],
        *({"gpus": [entry["gpu"]]} for entry in document["reserves"]),
    ):
        for gpu in entry["gpus"]:
            if device_profile(gpu).name != gpu:
                raise AssertionError(f"mig.json: {gpu} is no product name of catalogue.json")
    return document


YES: Final = "yes"
UNSURE: Final = "unsure"
NO: Final = "no"
UNKNOWN: Final = "unknown"
VERDICTS: Final = (YES, NO, UNSURE, UNKNOWN)

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
            :func:`gpumemnet.gpu.available.available_mib`.

    Returns:
        ``yes``, ``unsure``, ``no``, or ``unknown`` without an upper bound.
    """
    if safe_mib is None:
        return UNKNOWN
    if safe_mib <= available_mib:
        return YES
    return NO if expected_mib > available_mib else UNSURE
