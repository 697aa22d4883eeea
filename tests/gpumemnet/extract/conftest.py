import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parent / "examples"


@pytest.fixture(scope="session")
def examples() -> Path:
    """The folder of example models."""
    return EXAMPLES


def _example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        f"extract_example_{name}", EXAMPLES / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def small() -> ModuleType:
    """The module of small example models."""
    return _example("small")


@pytest.fixture(scope="session")
def broken() -> ModuleType:
    """The module of models that fail."""
    return _example("broken")
