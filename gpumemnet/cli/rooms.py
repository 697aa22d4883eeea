"""Finds the packages beside ``gpumemnet`` in a checkout and inside of it where it is installed."""

from __future__ import annotations

import sys
from typing import Literal

from gpumemnet.sandbox.checkout import checkout_folder

Room = Literal["dataset_builder", "models", "service"]


def room(name: Room) -> str:
    """The full name under which the package is imported.

    In a checkout, its root is put first on the import path: the current folder may hold a ``models`` of its own.
    """
    checkout = checkout_folder()
    if checkout is None:
        return f"gpumemnet.{name}"
    if sys.path[0] != str(checkout):
        sys.path.insert(0, str(checkout))
    return name
