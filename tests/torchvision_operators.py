"""torchvision beside a CPU build of PyTorch."""

import importlib.util
from contextlib import suppress
from functools import cache
from typing import Any


@cache
def declare_torchvision_operators() -> Any:
    """Declare the operators that ``import torchvision`` expects, once in a process.

    PyPI has only builds for CUDA, whose operators a CPU build of PyTorch cannot load.

    Returns:
        what keeps them declared.
    """
    import torch

    if importlib.util.find_spec("torchvision") is None or torch.version.cuda is not None:
        return None
    operators = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        with suppress(RuntimeError):  # somebody else has declared it
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    return operators
