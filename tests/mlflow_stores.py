"""MLflow stores in a folder, for tests that ask a real one; they skip where MLflow is not
installed."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from gpumemnet.site.mlflow import MlflowStore

needs_mlflow = pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None,
    reason="MLflow is not installed: pip install -e '.[mlflow]'",
)


_MADE: list[Path] = []


def empty_store(folders: pytest.TempPathFactory) -> Path:
    """An SQLite file with MLflow's tables, which take seconds to make: once in a process."""
    if not _MADE:
        file = folders.mktemp("mlflow") / "empty.db"
        MlflowStore(f"sqlite:///{file}")
        _MADE.append(file)
    return _MADE[0]


def store_in(folder: Path, empty: Path) -> str:
    """The address of a store of its own in ``folder``."""
    folder.mkdir(exist_ok=True)
    return f"sqlite:///{shutil.copyfile(empty, folder / 'mlflow.db')}"
