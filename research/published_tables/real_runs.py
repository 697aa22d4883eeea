"""Readings of real models that others have published, and how each model is built and trained so
that it can be traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from gpumemnet.gpu import DeviceProfile, device_profile
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.operators.rules import Platform

from .cudnn_transforms import largest_transform_bytes

Row = Mapping[str, str]
"""Column → text of one row of a published table."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RealModel:
    """A model that was trained in one way, at several batch sizes.

    Attributes:
        key: name of its file among the traced runs.
        build: makes it on meta tensors, with no weights downloaded.
        sample: what it is called with at a batch size: a tensor, or keyword arguments.
        options: how it was trained.
        gpu: a GPU that it ran on.
        prefetches: whether the data loader copied the next batch to the GPU during each step.
        tries_transforms: whether cuDNN's search tried FFT and Winograd transforms, as before
            version 9.8.
    """

    key: str
    build: Callable[[], nn.Module]
    sample: Callable[[nn.Module, int], Any]
    options: TraceOptions
    gpu: str
    prefetches: bool = False
    tries_transforms: bool = False

    def platform(self, gpu: str) -> Platform:
        """The platform on which it ran on ``gpu``."""
        return self.platform_on(device_profile(gpu))

    def platform_on(self, device: DeviceProfile) -> Platform:
        """The platform on which it ran on a GPU with this profile."""
        search = largest_transform_bytes if self.tries_transforms else None
        return replace(Platform.of(device, self.options), further_search_bytes=search)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reading:
    """One row of a published table.

    Attributes:
        model: key of its model.
        batch_size: samples per step.
        fields: of the :class:`~gpumemnet.job.measurement.Measurement`, all but the job and what is
            traced.
    """

    model: str
    batch_size: int
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class RealRuns:
    """A published table.

    Attributes:
        models: in the order in which they are traced: one model of each family first, so that a
            part serves too.
        readings: in the order of the table.
    """

    models: tuple[RealModel, ...]
    readings: tuple[Reading, ...]


def family_by_family(
    names: Sequence[str], family: Callable[[str], str], is_wanted: Callable[[str], bool]
) -> list[str]:
    """The names in rounds of one per family; those that are not wanted come last."""
    rounds: dict[str, int] = {}
    order = []
    for name in sorted(names, key=lambda name: (not is_wanted(name), name)):
        number = rounds[family(name)] = rounds.get(family(name), -1) + 1
        order.append((not is_wanted(name), number, name))
    return [name for *_, name in sorted(order)]
