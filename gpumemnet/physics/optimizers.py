"""Optimizers: the state that each keeps between steps, and the temporaries of its step.

Source: ``torch/optim/*.py`` of PyTorch 2.11.  The foreach implementation has temporaries for all
parameters at once, the for-loop implementation (``_single_tensor_…``) for one parameter, and the
fused implementation has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from gpumemnet.atomic_files import shipped_json

LEARNING_RATE: Final = 1e-3
"""Of every optimizer that is made by its name; it moves no memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRule:
    """What PyTorch's implementation of one optimizer does.  Copies are tensors as large as the
    parameters.

    Attributes:
        torch_class: name of the class in ``torch.optim``.
        state_copies: state between steps.
        foreach_copies: temporaries of the foreach implementation, for all parameters at once.
        loop_copies: temporaries of the for-loop implementation, for one parameter.  One of them
            belongs to the parameter before, because the last result keeps its name until the next
            one exists.
        is_foreach_by_default: whether PyTorch picks the foreach implementation on CUDA.
        is_factored: whether the state is a row and a column per matrix, see
            :data:`FACTORED_FILTERS`.
        has_fused: whether there is a fused implementation for CUDA.
        settings: keyword arguments beside the learning rate.
    """

    torch_class: str
    state_copies: float
    foreach_copies: float
    loop_copies: float
    is_foreach_by_default: bool = True
    is_factored: bool = False
    has_fused: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


OPTIMIZER_RULES: Final = {
    name: OptimizerRule(**rule) for name, rule in shipped_json("physics/optimizers.json").items()
}
"""Name of the optimizer → its rule, in the order of
:data:`gpumemnet.job.training_job.OPTIMIZERS`.

The foreach step of Adam holds the square root of the second moment; its loop the same, its
bias-corrected copy, and that of the parameter before.  That of Adagrad holds square root and
numerator.  Adafactor's state of a wide matrix is next to nothing; its loop holds the estimated
variance, and squares for its mean.
"""

IMPLEMENTATION_SWITCHES: Final = {
    "default": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "for_loop": {"foreach": False},
}
"""Implementation → the keyword arguments that ask PyTorch for it."""

FACTORED_FILTERS: Final = 1.2
"""State of a factored optimizer in copies of a convolution's parameters.

It is a row and a column of every filter: two copies for filters of 1 x 1, and two thirds of one for
3 x 3 (``torch/optim/_adafactor.py``).  Of the values tried, this one has the smallest error over
201 sampled networks.
"""


@dataclass(frozen=True, slots=True)
class OptimizerCopies:
    """State and temporaries of one optimizer in one implementation, in tensors of the parameters'
    size.

    Attributes:
        state: kept between steps.
        temporary: of the step, for all parameters at once.
        loop: of the step, for one parameter.
        is_foreach: whether the step works on lists of parameters.
    """

    state: float
    temporary: float
    loop: float = 0
    is_foreach: bool = True


FOREACH_COPIES: Final = {
    name: OptimizerCopies(rule.state_copies, rule.foreach_copies)
    for name, rule in OPTIMIZER_RULES.items()
}
LOOP_COPIES: Final = {name: rule.loop_copies for name, rule in OPTIMIZER_RULES.items()}
# The version of the features is a hash over these two, as they are printed:
# gpumemnet.predict.features.FEATURE_SCHEMA.


@cache
def optimizer_copies(optimizer: str, implementation: str) -> OptimizerCopies:
    """State and temporaries of an optimizer in an implementation."""
    rule = OPTIMIZER_RULES[optimizer]
    if implementation == "foreach" or (implementation == "default" and rule.is_foreach_by_default):
        return FOREACH_COPIES[optimizer]
    loop = 0.0 if implementation == "fused" else rule.loop_copies
    return OptimizerCopies(rule.state_copies, 0, loop, is_foreach=False)


def filter_copies(optimizer: str) -> float:
    """State of convolutions in copies of their parameters, beside :attr:`OptimizerCopies.state`."""
    return FACTORED_FILTERS if OPTIMIZER_RULES[optimizer].is_factored else 0.0


def torch_call(optimizer: str, implementation: str) -> tuple[str, dict[str, Any]]:
    """Name of the class in ``torch.optim``, and its keyword arguments for that implementation."""
    rule = OPTIMIZER_RULES[optimizer]
    return rule.torch_class, {
        "lr": LEARNING_RATE,
        **rule.settings,
        **IMPLEMENTATION_SWITCHES[implementation],
    }
