"""torchvision beside a CPU build of PyTorch."""

import pytest

from gpumemnet.torch_private.names import declare_torchvision_operators


@pytest.fixture(scope="session", autouse=True)
def torchvision_operators() -> None:
    """Declares the operators that ``import torchvision`` expects."""
    declare_torchvision_operators()
