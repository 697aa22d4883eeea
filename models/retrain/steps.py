"""Steps that are done once: their results lie under the hash of all that they depend on, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from gpumemnet.bundle import Bundle, load_bundle
from gpumemnet.durable import replace_file
from gpumemnet.errors import BundleError
from gpumemnet.features import FEATURE_SCHEMA

ROOT: Final = Path(__file__).resolve().parents[2]
TRAINING_CODE: Final = (
    *(f"models/{name}.py" for name in ("data", "export", "network", "physics_line", "plans", "sequence_network")),
    *(f"models/{name}.py" for name in ("sequence_training", "splits", "traced_peak", "training")),
    *("models/retrain/tracks.py", "models/retrain/training.py"),
    *(f"gpumemnet/{name}.py" for name in ("bundle", "closed_form", "feature_row", "features", "layers", "physics")),
    *(f"gpumemnet/{name}.py" for name in ("saved_tensors", "sequence", "training_reference")),
    "gpumemnet/devices.json",
)
"""Files whose change makes another model of the same data."""
JUDGING_CODE: Final = (
    *(f"models/retrain/{name}.py" for name in ("collect", "gate", "holdout", "judging", "pipeline", "units_check")),
    *(f"gpumemnet/{name}.py" for name in ("distribution", "estimates", "measurement", "predictor", "support", "validation")),
)
"""Files whose change may give another verdict on the same models."""
_PACKAGES: Final = ("torch", "numpy", "scikit-learn", "onnx", "onnxscript", "onnxruntime", "scipy")


def content_hash(*parts: Any) -> str:
    """Hash of JSON-ready values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def code_hash(files: tuple[str, ...]) -> str:
    """Hash of the code in ``files``, and of the versions of the packages that it calls; nothing of it is imported."""
    sources = [[name, hashlib.sha256((ROOT / name).read_bytes()).hexdigest()] for name in files]
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
    """What a lineage says of the code: package version, commit where there is one, hashes of the code itself."""
    try:
        version = metadata.version("gpumemnet")
    except metadata.PackageNotFoundError:
        version = "none"
    return {
        "gpumemnet": version,
        "commit": _commit(),
        "training_code": code_hash(TRAINING_CODE),
        "judging_code": code_hash(JUDGING_CODE),
        "packages": packages(),
    }


def _commit() -> str | None:
    if not (ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def cached_bundle(folder: Path, make: Callable[[Path], Bundle]) -> tuple[Bundle, bool]:
    """The bundle in ``folder``, made first where there is no whole one; and whether it was there."""
    try:
        return load_bundle(folder), True
    except BundleError:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return make(folder), False


def cached_document(path: Path, make: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """The JSON object in ``path``, made first where there is none; and whether it was there."""
    try:
        found = json.loads(path.read_bytes())
        if isinstance(found, dict):
            return found, True
    except (OSError, ValueError):
        pass
    made = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(made, indent=2, ensure_ascii=False).encode() + b"\n")
    return made, False
