"""Finds the other packages: next to ``gpumemnet`` in a checkout, inside it when installed."""

from __future__ import annotations

import sys
from typing import Literal

from gpumemnet.sandbox.user_code import checkout_folder

Room = Literal["dataset_builder", "models", "service"]


def room(name: Room) -> str:
    """Returns the full name under which the package is imported.

    In a checkout, its root becomes the first entry of the import path, because the current folder
    may hold another ``models``.
    """
    checkout = checkout_folder()
    if checkout is None:
        return f"gpumemnet.{name}"
    if sys.path[0] != str(checkout):
        sys.path.insert(0, str(checkout))
    return name
