"""Ray, imported where ``--engine ray`` asks for it and nowhere else."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import gpumemnet
from gpumemnet.errors import MissingExtraError


def load_ray() -> Any:
    """The package ``ray``.

    Raises:
        MissingExtraError: when it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere unless the user says so
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "ray", "--engine ray") from None
    return ray


def package_folders(module: str) -> list[str]:
    """The folders that a Ray cluster needs to import ``module``: that of its top-level package, and that of ``gpumemnet``."""
    packages = {sys.modules[module.partition(".")[0]], gpumemnet}
    return sorted(str(Path(str(package.__file__)).parent) for package in packages)
