"""Ray, imported where ``--engine ray`` asks for it and nowhere else."""

from __future__ import annotations

import os
from typing import Any

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
