"""Bundles that differ from the shipped ones, for tests of registries and of what serves from
them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from gpumemnet.errors import BundleError
from gpumemnet.predict.bundle import Bundle, load_bundle, save_bundle, shipped_bundles
from gpumemnet.site.releases import Registry


def shipped(name: str = "mlp") -> Bundle:
    return next(bundle for bundle in shipped_bundles() if bundle.card.name == name)


def other_bundle(folder: Path, version: str, name: str = "mlp", **changes: Any) -> Bundle:
    """A valid bundle with the graph of the shipped one called ``name``; ``changes`` replace fields
    of its card."""
    bundle = shipped(name)
    return save_bundle(
        folder, bundle.model, {**bundle.card.document, "version": version, **changes}
    )


def add_release(registry: Registry, work: Path, release: str, **changes: Any) -> str:
    """Add the release ``release`` whose MLP-based bundle has it as its version; returns that bundle's
    hash."""
    bundle = other_bundle(work / release, release, **changes)
    registry.create_release(release, [bundle.source])
    return bundle.sha256


def problems(registry: Registry) -> list[str]:
    """What is wrong with the aliases, the releases and all bundles."""
    found = []
    checks: list[Callable[[], object]] = [registry.aliases]
    for path in sorted(registry.folder.glob("releases/[!.]*")):
        checks.append(partial(registry.load, path.stem))
    for path in sorted(registry.folder.glob("bundles/[!.]*")):
        checks.append(partial(load_bundle, path))
    for check in checks:
        try:
            check()
        except BundleError as error:
            found.append(str(error))
    return found
