"""Where this code lies: in a checkout of the repository, or installed.

A checkout keeps ``service``, ``models`` and ``dataset_builder`` beside ``gpumemnet``; a wheel
installs them inside of it, so that nothing with a general name lands in ``site-packages``.
"""

from __future__ import annotations

from pathlib import Path

import gpumemnet


def checkout_folder() -> Path | None:
    """The root of the checkout that ``gpumemnet`` is imported from; ``None`` where it is
    installed."""
    package = Path(gpumemnet.__path__[0]).resolve()
    return None if (package / "service").is_dir() else package.parent
