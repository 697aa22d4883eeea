"""Bytes per element: what a job's precision and its optimizer make of a parameter and of an activation.

The facts are PyTorch's: autocast keeps fp32 weights, gradients and optimizer state and caches a half copy of the weights
(``torch/amp/autocast_mode.py``); state tensors and foreach temporaries are those of ``torch/optim/*.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes per element of inputs, of weights (gradients, optimizer state), of activations, and of the weights' cast copies."""

    inputs: int
    weight: int
    activation: int
    weight_copy: int


ELEMENT_BYTES: Final[dict[str, ElementBytes]] = {
    "fp32": ElementBytes(4, 4, 4, 0),
    "tf32": ElementBytes(4, 4, 4, 0),
    "amp_fp16": ElementBytes(4, 4, 2, 2),
    "amp_bf16": ElementBytes(4, 4, 2, 2),
    "bf16": ElementBytes(2, 2, 2, 0),
}


@dataclass(frozen=True, slots=True)
class OptimizerCopies:
    """Tensors of the parameters' own size: state kept between steps, temporaries of the step; whether that works on lists."""

    state: float
    temporary: float
    is_foreach: bool = True


FOREACH_COPIES: Final[dict[str, OptimizerCopies]] = {
    "sgd": OptimizerCopies(0, 0),
    "sgd_momentum": OptimizerCopies(1, 0),
    "adam": OptimizerCopies(2, 1),  # the square root of the second moment, for all parameters at once
    "adamw": OptimizerCopies(2, 1),
    "rmsprop": OptimizerCopies(1, 1),
    "adagrad": OptimizerCopies(1, 2),  # square root and numerator
    "adafactor": OptimizerCopies(0, 1),  # a row and a column per matrix: two orders below one copy
}


@cache
def optimizer_copies(optimizer: str, implementation: str) -> OptimizerCopies:
    """State and temporaries; only the foreach path holds temporaries for all parameters.

    It is PyTorch's default on CUDA, but for Adafactor, whose default is the loop (``torch/optim/_adafactor.py``).
    """
    copies = FOREACH_COPIES[optimizer]
    is_foreach = implementation == "foreach" or (implementation == "default" and optimizer != "adafactor")
    return copies if is_foreach else OptimizerCopies(copies.state, 0, is_foreach=False)
