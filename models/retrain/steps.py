"""Caches the results of steps under the hash of everything they depend on; writes are atomic."""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
from collections.abc import Callable, Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import BundleError
from gpumemnet.predict.bundle import Bundle, load_bundle
from gpumemnet.predict.features import FEATURE_SCHEMA

_MODELS: Final = __name__.removesuffix(".retrain.steps")
"""``models`` in a checkout, ``gpumemnet.models`` where it is installed."""
ROOT: Final = Path(__file__).resolve().parents[__name__.count(".")]
"""The folder that holds our packages."""
TRAINING_CODE: Final = (f"{_MODELS}.retrain.training",)
"""Modules whose change, or that of one that they import, makes another model of the same data."""
JUDGING_CODE: Final = (f"{_MODELS}.retrain.pipeline", *TRAINING_CODE)
"""Modules whose change, or that of one that they import, may give another verdict on the same
models."""
_OURS: Final = ("gpumemnet", _MODELS)
_PACKAGES: Final = ("torch", "numpy", "scikit-learn", "onnx", "onnxscript", "onnxruntime", "scipy")


def content_hash(*parts: Any) -> str:
    """Hash of JSON-ready values."""
    return hashlib.sha256(
        json.dumps(parts, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


@cache
def code_hash(modules: tuple[str, ...]) -> str:
    """Hash of the code of ``modules`` and of all of ours that it imports, and of the packages'
    versions; nothing is imported."""
    sources = [
        [str(path.relative_to(ROOT)), hashlib.sha256(path.read_bytes()).hexdigest()]
        for path in code_files(modules)
    ]
    return content_hash(sources, packages(), FEATURE_SCHEMA)


def code_files(modules: Iterable[str]) -> list[Path]:
    """The files of ``modules``, of those that they import from us wherever they do so, and the JSON
    beside each."""
    found: set[Path] = set()
    left = [path for name in modules for path in _file_of(name)]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            package = path.relative_to(ROOT).parent.parts
            names = (
                name
                for node in ast.walk(ast.parse(path.read_bytes()))
                for name in _imported(node, package)
            )
            left += [imported for name in names for imported in _file_of(name)]
    return sorted(
        {*found, *(data for path in found if (data := path.with_suffix(".json")).is_file())}
    )


def _imported(node: ast.AST, package: tuple[str, ...]) -> list[str]:
    """What ``node``, of a module in ``package``, imports by full names."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = package[: len(package) + 1 - node.level] if node.level else ()
        module = ".".join([*above, *([node.module] if node.module else [])])
        return [module, *(f"{module}.{alias.name}" for alias in node.names)]
    return []


def _file_of(module: str) -> list[Path]:
    """The module's file where it is one of ours; a package's ``__init__`` counts, what else it
    holds does not."""
    if module.split(".")[0] not in _OURS:
        return []
    path = ROOT.joinpath(*module.split("."))
    return [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]


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
        "training_code": code_hash(TRAINING_CODE),
        "judging_code": code_hash(JUDGING_CODE),
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
