"""What a job can use of a GPU or of one of its MIG partitions: memory that is there, less what the driver keeps for itself.

The numbers are published readings of others, in ``mig.json`` with the source of each; where readings differ the smallest memory
and the largest reserve stand there, because a job that is placed too tightly dies.  Profiles without a reading are left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.gpu.catalogue import DeviceProfile, device_profile
from gpumemnet.job.layers import describe
from gpumemnet.units import MIB

GENERIC_RESERVED_MIB: Final = 768
"""Assumed to be kept back by the driver on a GPU without a published reading: as much as the largest reading there is (A100 of
80 GB).  It is an assumption, and on a small GPU a cautious one; the readings lie between 267 and 768 MiB."""

MIG_RESERVED_MIB: Final = 64
"""Assumed to be kept back in a MIG instance: idle ones show 6 to 71 MiB as used in published ``nvidia-smi`` listings, mostly
below 40 (such as github.com/XuehaiPan/nvitop/pull/8).  It does not depend on the profile here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigProfile:
    """One kind of MIG instance of one GPU model.

    Attributes:
        gpu: product name of the GPU.
        name: such as ``3g.20gb``.
        memory_mib: memory of an instance; its name says gigabytes, rounded up.
        source: who read it.
    """

    gpu: str
    name: str
    memory_mib: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """What the driver keeps of a GPU's memory.

    Attributes:
        reserved_mib: so much.
        source: who read it, or that it is assumed.
    """

    reserved_mib: int
    source: str


@cache
def mig_profiles(gpu: str) -> tuple[MigProfile, ...]:
    """The MIG profiles of a GPU by its product name, from the smallest; none where it has none or nobody has published them."""
    return tuple(
        MigProfile(gpu=gpu, name=name, memory_mib=memory_mib, source=entry["source"])
        for entry in _catalogue()["partitions"]
        if gpu in entry["gpus"]
        for name, memory_mib in entry["profiles_mib"].items()
    )


def mig_profile(gpu: str, name: str) -> MigProfile:
    """The MIG profile ``name`` of a GPU by its product name; case does not matter.

    Raises:
        InvalidRequestError: lists the GPU's profiles.
    """
    profiles = mig_profiles(gpu)
    for profile in profiles:
        if isinstance(name, str) and name.casefold() == profile.name:
            return profile
    known = ", ".join(profile.name for profile in profiles) or "none"
    raise InvalidRequestError(f"no MIG profile {describe(name)} of the {gpu} is known: known are {known}", "mig")


@cache
def reserve(gpu: str) -> Reserve:
    """What the driver keeps of the GPU with this product name: by a published reading, else assumed."""
    for entry in _catalogue()["reserves"]:
        if entry["gpu"] == gpu:
            return Reserve(reserved_mib=entry["reserved_mib"], source=entry["source"])
    return Reserve(reserved_mib=GENERIC_RESERVED_MIB, source="assumed: nobody has published a reading")


def available_mib(profile: DeviceProfile, mig: MigProfile | None = None) -> int:
    """Whole MiB that one process can use of an otherwise empty GPU, or of an empty MIG instance on it."""
    whole = profile.capacity_bytes // MIB - reserve(profile.name).reserved_mib
    return whole if mig is None else min(whole, mig.memory_mib - MIG_RESERVED_MIB)


@cache
def _catalogue() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(resources.files("gpumemnet").joinpath("gpu/mig.json").read_text("utf-8"))
    for entry in (*document["partitions"], *({"gpus": [entry["gpu"]]} for entry in document["reserves"])):
        for gpu in entry["gpus"]:
            if device_profile(gpu).name != gpu:
                raise AssertionError(f"mig.json: {gpu} is no product name of catalogue.json")
    return document
