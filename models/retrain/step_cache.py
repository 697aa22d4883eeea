"""Caches the results of steps under the hash of everything they depend on; writes are atomic."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import BundleError
from gpumemnet.predict.bundle import Bundle, load_bundle
from gpumemnet.predict.features import FEATURE_SCHEMA

ROOT: Final = Path(__file__).resolve().parents[__name__.count(".")]
"""The folder that holds our packages."""
_OURS: Final = tuple(dict.fromkeys(("gpumemnet", __name__.split(".")[0])))
"""Packages whose change may make another model, or give another verdict."""
_PACKAGES: Final = ("torch", "numpy", "scikit-learn", "onnx", "onnxscript", "onnxruntime", "scipy")


def content_hash(*parts: Any) -> str:
    """Hash of JSON-ready values."""
    return hashlib.sha256(
        json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


@cache
def code_hash() -> str:
    """Hash of the code that trains and judges, of the JSON beside it, and of the packages'
    versions."""
    paths = sorted(
        path
        for package in _OURS
        for ending in ("*.py", "*.json")
        for path in (ROOT / package).rglob(ending)
        if "bundles" not in path.parts
    )
    sources = [
        [str(path.relative_to(ROOT)), hashlib.sha256(path.read_bytes()).hexdigest()]
        for path in paths
    ]
    return content_hash(sources, packages(), FEATURE_SCHEMA)


def packages() -> dict[str, str]:
    """Versions of the packages that train, judge and export."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "none"
    return versions


def code_version() -> dict[str, Any]:
    """The code in a lineage: package version, commit if there is one, and hashes of the code
    itself."""
    try:
        version = metadata.version("gpumemnet")
    except metadata.PackageNotFoundError:
        version = "none"
    return {
        "gpumemnet": version,
        "commit": _commit(),
        "sha256": code_hash(),
        "packages": packages(),
    }


def _commit() -> str | None:
    if not (ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def cached_bundle(folder: Path, make: Callable[[Path], Bundle]) -> tuple[Bundle, bool]:
    """The bundle in ``folder``, made if it is not there, and whether it was there."""
    try:
        return load_bundle(folder), True
    except BundleError:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return make(folder), False


def cached_document(
    path: Path,
    make: Callable[[], dict[str, Any]],
    still_holds: Callable[[dict[str, Any]], bool] = lambda found: True,
) -> tuple[dict[str, Any], bool]:
    """The JSON object in ``path``, made if it is missing or outdated, and whether it was there."""
    try:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict) and still_holds(found):
            return found, True
    except (OSError, ValueError):
        pass
    made = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(
        path, json.dumps(made, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    )
    return made, False
