"""torchvision beside a CPU build of PyTorch."""

import importlib.util
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def torchvision_operators() -> Iterator[None]:
    """Declare the operators that ``import torchvision`` expects.

    PyPI has only builds for CUDA, whose operators a CPU build of PyTorch cannot load.
    """
    if importlib.util.find_spec("torchvision") is None or torch.version.cuda is not None:
        yield
        return
    operators = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        with suppress(RuntimeError):  # another test of this process has declared it
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    yield
