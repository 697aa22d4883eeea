"""Tells whether the compiled modules were built, and refuses those that are older than their
sources.

Without compiled modules, predictions are the same but slower.  In a checkout, Python loads a
compiled module even when its source has changed since; it would fail in strange ways, or compute by
the old rules.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

from gpumemnet.errors import StaleModulesError

NOT_COMPILED: Final = "gpumemnet's compiled modules were not built, so predictions take longer: install a C compiler, then gpumemnet again"

_PACKAGE: Final = Path(__file__).parent


def is_compiled() -> bool:
    """Whether this installation has compiled modules; the build makes all of them or none."""
    return any(path.name.endswith(EXTENSION_SUFFIXES[0]) for path in _PACKAGE.glob("*/*"))


def check_sources(record: str) -> None:
    """Check that the compiled modules of a checkout were made from its present sources.

    Args:
        record: path of the file that an editable installation writes (``hatch_build.py``): compiled
            module → SHA-256 of its ``.py`` and ``.pxd`` files.

    Raises:
        StaleModulesError: names the changed sources, and the command that compiles them.
    """
    changed = []
    for library, digest in json.loads(Path(record).read_text("utf-8")).items():
        texts = [_PACKAGE / (library.partition(".")[0] + ending) for ending in (".py", ".pxd")]
        is_there = (_PACKAGE / library).exists() and all(text.exists() for text in texts)
        if (
            is_there
            and hashlib.sha256(b"".join(text.read_bytes() for text in texts)).hexdigest() != digest
        ):
            changed.append(str(texts[0].relative_to(_PACKAGE.parent)))
    if changed:
        raise StaleModulesError(
            f"{', '.join(changed)}: changed after being compiled; compile again: "
            f"{sys.executable} -m pip install --no-deps --editable {_PACKAGE.parent}"
        )
