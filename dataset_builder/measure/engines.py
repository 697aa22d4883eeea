"""The engines by name: the GPUs of this machine, or those of a Ray cluster."""

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import StrEnum

from .engine import Engine
from .local_engine import LocalEngine


class EngineName(StrEnum):
    """Names of the engines on the command line."""

    LOCAL = "local"
    RAY = "ray"


def open_engine(name: EngineName, enable_accounting: bool) -> AbstractContextManager[Engine]:
    """The engine called ``name``, holding its GPUs.

    Raises:
        MissingExtraError: when it needs a package that is not installed.
        MeasurementError: when it has no GPU whose readings can be trusted.
    """
    if name is EngineName.LOCAL:
        return LocalEngine(enable_accounting)
    from .ray_engine import RayEngine

    return RayEngine(enable_accounting)
