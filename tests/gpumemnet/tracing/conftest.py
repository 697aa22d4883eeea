from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from gpumemnet.gpu import device_profile
from gpumemnet.tracing.operators.rules import Platform

EXTRACT_EXAMPLES = Path(__file__).parents[1] / "extract" / "examples"


@pytest.fixture
def platform() -> Platform:
    return Platform(device=device_profile("A100"))


@pytest.fixture(scope="session")
def example() -> Callable[[str], ModuleType]:
    """Loads an example model's file: those of the extractor, which the trace shares."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, EXTRACT_EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
