"""The rates of a GPU and its host, from which times are modelled.

An operator takes the longer of two times: of its floating-point operations at the peak rate of
their element type, and of the bytes that it moves at the bandwidth of the memory.  That is the
roofline model (Williams et al., CACM 2009).  Peak rates come from the maker's data sheets.
Programs reach a part of them: one factor, :data:`EFFICIENCY`, applies to all rates, so which plan
    is best does not depend on it.  Nothing here is measured, unless the rates come from a file of
    the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import InvalidRequestError
from gpumemnet.gpu.catalogue import DeviceProfile, find_profile
from gpumemnet.job.layers import describe
from gpumemnet.planner.costs import ELEMENT_TYPES, Work
from gpumemnet.units import GIB

if TYPE_CHECKING:
    from gpumemnet.planner.options import PlanRequest

EFFICIENCY: Final = 0.7
"""Share of every peak rate that programs are assumed to reach."""
HOST_MEMORY_BYTES: Final = 64 * GIB
"""Pinned host memory that a plan may take, if nothing else is said."""
MACHINE_FORMAT: Final = "gpumemnet-machine"
_RATES: Final = (
    "memory_bytes_per_second",
    "to_host_bytes_per_second",
    "from_host_bytes_per_second",
)


@dataclass(frozen=True)
class Machine:
    """A GPU and its host.

    Attributes:
        name: name of the GPU.
        flops_per_second: peak rate of each element type of
            :data:`~gpumemnet.planner.costs.ELEMENT_TYPES`; one without a rate has that of ``fp32``.
        memory_bytes_per_second: bandwidth of the GPU's memory.
        to_host_bytes_per_second, from_host_bytes_per_second: bandwidth of copies to pinned host
        memory and back.
        host_memory_bytes: pinned host memory that a plan may take.
        efficiency: share of these rates that is reached; 1 for measured rates.
        source: where the rates come from.
    """

    name: str
    flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    to_host_bytes_per_second: float
    from_host_bytes_per_second: float
    host_memory_bytes: int = HOST_MEMORY_BYTES
    efficiency: float = EFFICIENCY
    source: str = ""

    @cached_property
    def _rates(self) -> NDArray[np.float64]:
        fallback = self.flops_per_second["fp32"]
        return np.array([self.flops_per_second.get(name, fallback) for name in ELEMENT_TYPES])

    def seconds(self, work: Work) -> NDArray[np.float64]:
        """Return the modelled seconds of each operator, shape ``[operators]``."""
        computing = work.flops / self._rates[work.element_types]
        moving = work.moved_bytes / self.memory_bytes_per_second
        return np.asarray(np.maximum(computing, moving) / self.efficiency)

    def to_host_seconds(self, amount_bytes: float) -> float:
        """Return the modelled seconds of a copy to the host."""
        return amount_bytes / (self.to_host_bytes_per_second * self.efficiency)

    def from_host_seconds(self, amount_bytes: float) -> float:
        """Return the modelled seconds of a copy from the host."""
        return amount_bytes / (self.from_host_bytes_per_second * self.efficiency)


def machine_of(gpu: DeviceProfile, host_memory_bytes: int = HOST_MEMORY_BYTES) -> Machine:
    """Return the machine with the data sheet's rates of ``gpu``.

    Raises:
        InvalidRequestError: the catalogue has no rates for it.
    """
    fp32, fp16, memory, link = (
        gpu.fp32_tflops,
        gpu.fp16_tflops,
        gpu.memory_gb_per_second,
        gpu.host_link_gb_per_second,
    )
    if fp32 is None or fp16 is None or memory is None or link is None:
        raise InvalidRequestError(
            f"the catalogue has no rates for {gpu.name}; with --machine name a similar GPU, or a file of rates "
            f"(format '{MACHINE_FORMAT}')",
            "gpu",
        )
    flops = {"fp32": fp32, "fp16": fp16, "tf32": gpu.tf32_tflops or fp32}
    if gpu.compute_capability >= (8, 0):
        flops["bf16"] = fp16
    return Machine(
        name=gpu.name,
        flops_per_second={name: rate * 1e12 for name, rate in flops.items()},
        memory_bytes_per_second=memory * 1e9,
        to_host_bytes_per_second=link * 1e9,
        from_host_bytes_per_second=link * 1e9,
        host_memory_bytes=host_memory_bytes,
        source=f"modelled at {EFFICIENCY:.0%} of the data sheet's peak rates",
    )


def requested_machine(request: PlanRequest) -> Machine:
    """Return the machine whose rates give the times of a plan.

    Raises:
        InvalidRequestError: as :func:`find_machine`.
    """
    if request.machine is None:
        return machine_of(request.trace.gpu, request.host_bytes or HOST_MEMORY_BYTES)
    return find_machine(request.machine, request.host_bytes)


def find_machine(name_or_path: str | Path, host_memory_bytes: int | None = None) -> Machine:
    """Return the machine of a GPU in the catalogue, or the one in a JSON file.

    The file is an object.  Its ``format`` is ``gpumemnet-machine``, and it has ``name``,
    ``flops_per_second`` (rates by element type, at least that of ``fp32``),
    ``memory_bytes_per_second``, ``to_host_bytes_per_second`` and ``from_host_bytes_per_second``.
    It may have ``host_memory_bytes``, ``efficiency`` and ``source``.

    Args:
        name_or_path: name or alias of a GPU, or the path of a file that ends in ``.json``.
        host_memory_bytes: replaces the machine's.

    Raises:
        InvalidRequestError: there is no such GPU, it has no rates, or the file is wrong.
    """
    if not str(name_or_path).endswith(".json"):
        return machine_of(find_profile(str(name_or_path)), host_memory_bytes or HOST_MEMORY_BYTES)
    path = Path(name_or_path)
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}", "machine") from None
    except ValueError:
        raise InvalidRequestError(f"{path} is no JSON file", "machine") from None
    machine = _machine_from_dict(document)
    return (
        machine
        if host_memory_bytes is None
        else replace(machine, host_memory_bytes=host_memory_bytes)
    )


def machine_to_dict(machine: Machine) -> dict[str, Any]:
    """Return ``machine`` as the JSON object that :func:`find_machine` reads."""
    names = ("name", "flops_per_second", *_RATES, "host_memory_bytes", "efficiency", "source")
    return {"format": MACHINE_FORMAT, **{name: getattr(machine, name) for name in names}}


def _machine_from_dict(document: object) -> Machine:
    if not isinstance(document, Mapping) or document.get("format") != MACHINE_FORMAT:
        raise InvalidRequestError(
            f"is no machine: its 'format' must be '{MACHINE_FORMAT}'", "machine"
        )
    values = {name: value for name, value in document.items() if name != "format"}
    known = ("name", "flops_per_second", *_RATES, "host_memory_bytes", "efficiency", "source")
    for name in values:
        if name not in known:
            raise InvalidRequestError(
                f"is not a field; known are {', '.join(known)}", f"machine.{name}"
            )
    for name in known[: 2 + len(_RATES)]:
        if name not in values:
            raise InvalidRequestError("is missing", f"machine.{name}")
    flops = values["flops_per_second"]
    if (
        not isinstance(flops, Mapping)
        or "fp32" not in flops
        or not set(flops) <= set(ELEMENT_TYPES)
    ):
        raise InvalidRequestError(
            f"must hold the rate of fp32, and may hold those of {', '.join(ELEMENT_TYPES)}",
            "machine.flops_per_second",
        )
    rates = {f"flops_per_second.{name}": rate for name, rate in flops.items()} | {
        name: values[name] for name in _RATES
    }
    rates |= {name: values[name] for name in ("host_memory_bytes", "efficiency") if name in values}
    for name, rate in rates.items():
        if type(rate) not in (int, float) or not 0 < rate < float("inf"):
            raise InvalidRequestError(
                f"must be a number above 0, not {describe(rate)}", f"machine.{name}"
            )
    if values.get("efficiency", 1) > 1:
        raise InvalidRequestError(
            f"must be at most 1, not {describe(values['efficiency'])}", "machine.efficiency"
        )
    return Machine(**{"efficiency": 1.0, "source": "rates given by the user", **values})
