"""Imports Ray, only when ``--engine ray`` is used."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import gpumemnet
from gpumemnet.errors import MissingExtraError


def load_ray() -> Any:
    """Imports Ray with its usage statistics disabled.

    Raises:
        MissingExtraError: when Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # usage statistics are sent only if the user enables them
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "ray", "--engine ray") from None
    return ray


def package_folders(module: str) -> list[str]:
    """Folders that a Ray cluster needs to import ``module``: those of its top-level package and of ``gpumemnet``."""
    packages = {sys.modules[module.partition(".")[0]], gpumemnet}
    return sorted(str(Path(str(package.__file__)).parent) for package in packages)
