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
    """Tensors of the parameters' own size.

    Attributes:
        state: kept between steps.
        temporary: of the step, for all parameters at once.
        loop: of the step where it goes through the parameters one by one; one of them is of the parameter before the one at
            hand, because its last result keeps its name until it has another.
        is_foreach: whether the step works on lists of parameters.
    """

    state: float
    temporary: float
    loop: float = 0
    is_foreach: bool = True


FOREACH_COPIES: Final[dict[str, OptimizerCopies]] = {
    "sgd": OptimizerCopies(0, 0),
    "sgd_momentum": OptimizerCopies(1, 0),
    "adam": OptimizerCopies(2, 1),  # the square root of the second moment, for all parameters at once
    "adamw": OptimizerCopies(2, 1),
    "rmsprop": OptimizerCopies(1, 1),
    "adagrad": OptimizerCopies(1, 2),  # square root and numerator
    # a row and a column per matrix: of a wide one next to nothing; of convolutions FACTORED_FILTERS
    "adafactor": OptimizerCopies(0, 1),
}


LOOP_COPIES: Final[dict[str, float]] = {
    "sgd": 0,
    "sgd_momentum": 0,
    "adam": 3,  # the square root, and the same with its bias corrected; that of the parameter before
    "adamw": 3,
    "rmsprop": 2,
    "adagrad": 2,
    "adafactor": 2,  # the estimated variance, and squares for its mean, more or less of them by the shape
}
"""Temporaries of one parameter in the loop (``_single_tensor_…`` in ``torch/optim/*.py``)."""


FACTORED_FILTERS: Final = 1.2
"""Adafactor's state in copies of a convolution's parameters: a row and a column of every filter, which are two copies for filters
of 1 x 1 and two thirds of one for 3 x 3 (``torch/optim/_adafactor.py``); of 201 sampled networks this is off by the least."""


@cache
def optimizer_copies(optimizer: str, implementation: str) -> OptimizerCopies:
    """State and temporaries; only the foreach path holds temporaries for all parameters, and a fused one none.

    Foreach is PyTorch's default on CUDA, but for Adafactor, whose default is the loop (``torch/optim/_adafactor.py``).
    """
    copies = FOREACH_COPIES[optimizer]
    if implementation == "foreach" or (implementation == "default" and optimizer != "adafactor"):
        return copies
    loop = 0.0 if implementation == "fused" else LOOP_COPIES[optimizer]
    return OptimizerCopies(copies.state, 0, loop, is_foreach=False)
