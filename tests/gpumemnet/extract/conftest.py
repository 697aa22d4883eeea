import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent / "examples"


@pytest.fixture(scope="session")
def examples():
    """The folder of example models."""
    return EXAMPLES


def _example(name):
    spec = importlib.util.spec_from_file_location(f"extract_example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def small():
    """The module of small example models."""
    return _example("small")


@pytest.fixture(scope="session")
def broken():
    """The module of models that fail."""
    return _example("broken")


@pytest.fixture(scope="session")
def vit():
    """The module of the vision transformer."""
    return _example("vit")
