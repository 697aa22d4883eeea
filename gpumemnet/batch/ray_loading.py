"""Imports Ray, only when ``--engine ray`` is used, and connects to a cluster."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gpumemnet
from gpumemnet.errors import GpumemnetError, MissingExtraError


def load_ray() -> Any:
    """Imports Ray with its usage statistics disabled.

    Raises:
        MissingExtraError: when Ray is not installed.
    """
    os.environ.setdefault(
        "RAY_USAGE_STATS_ENABLED", "0"
    )  # usage statistics are sent only if the user enables them
    try:
        import ray
    except ImportError:
        raise MissingExtraError("ray", "ray", "--engine ray") from None
    return ray


def package_folders(module: str) -> list[str]:
    """Folders that a Ray cluster needs to import ``module``: those of its top-level package and of
    ``gpumemnet``."""
    packages = {sys.modules[module.partition(".")[0]], gpumemnet}
    return sorted(str(Path(str(package.__file__)).parent) for package in packages)


def connect(ray: Any, runtime_env: Mapping[str, Any], error_type: type[GpumemnetError]) -> None:
    """Connects to the cluster that ``RAY_ADDRESS`` names, to one that runs on this machine, or
    starts one here.

    Args:
        ray: the module.
        runtime_env: Ray's description of the workers' environment.
        error_type: class of the error when that fails.
    """
    try:
        ray.init(runtime_env=dict(runtime_env), log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises a plain Exception when a node does not start in time
        raise error_type(
            f"the Ray cluster cannot be reached ({last_line(error)}): RAY_ADDRESS names it, and a cluster with token "
            "authentication needs its token on this machine too"
        ) from None


def last_line(error: BaseException) -> str:
    """The last line of the message, which names the cause of the errors that Ray wraps around
    it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]
