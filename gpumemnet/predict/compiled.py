"""Tells whether the compiled modules were built; without them, predictions are the same but slower."""

from __future__ import annotations

from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

NOT_COMPILED: Final = (
    "gpumemnet's compiled modules were not built, so predictions take longer: install a C compiler, then gpumemnet again"
)


def is_compiled() -> bool:
    """Whether this installation has compiled modules; the build makes all of them or none."""
    return any(path.name.endswith(EXTENSION_SUFFIXES[0]) for path in Path(__file__).parents[1].glob("*/*"))
