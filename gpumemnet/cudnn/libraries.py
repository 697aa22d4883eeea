"""Finds cuDNN on this machine."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe

AUTO: Final = "auto"
OFF: Final = "off"
LIBRARY: Final = "libcudnn.so.9"
_IN_SITE_PACKAGES: Final = "nvidia/cudnn/lib"
"""Where the wheels ``nvidia-cudnn-cu12`` and ``-cu13``, which every CUDA build of PyTorch requires,
put it."""
_SYSTEM_FOLDERS: Final = (
    f"/usr/lib/{platform.machine()}-linux-gnu",
    "/usr/lib64",
    "/usr/local/cuda/lib64",
)


def find_library(cudnn: str) -> Path | None:
    """Return the file of cuDNN that ``cudnn`` means; ``None`` for ``off``, and for ``auto`` if
    there is none.

    Args:
        cudnn: ``auto`` for the one that is installed with this Python or on the system; ``off``; or
            the path of the library, of the folder that holds it, or of a ``site-packages`` folder
            with its wheel.

    Raises:
        InvalidRequestError: there is no cuDNN at this path.
    """
    if cudnn == OFF:
        return None
    if cudnn == AUTO:
        folders = [
            *(Path(entry) / _IN_SITE_PACKAGES for entry in sys.path if entry),
            Path(sys.prefix) / "lib",
        ]
        candidates = [folder / LIBRARY for folder in (*folders, *map(Path, _SYSTEM_FOLDERS))]
        return next((path for path in candidates if path.is_file()), None)
    path = Path(cudnn).expanduser().resolve()
    candidates = [path] if path.is_file() else [path / LIBRARY, path / _IN_SITE_PACKAGES / LIBRARY]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        raise InvalidRequestError(
            f"no {LIBRARY} at {describe(cudnn)}: give auto, off, or a folder that holds it, such as "
            f"…/site-packages/{_IN_SITE_PACKAGES}",
            "cudnn",
        )
    return found
