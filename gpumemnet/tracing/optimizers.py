"""Builds the optimizer as it would run on CUDA: a named one with its usual settings, or a user's
own over meta parameters.

PyTorch picks the foreach or the fused path only for parameters on a GPU;
:func:`~gpumemnet.torch_private.training.gpu_optimizers` lets it pick them here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.physics.optimizers import OPTIMIZER_RULES, torch_call
from gpumemnet.tracing.options import TraceOptions

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


def named_optimizer(
    name: str, implementation: str = "default", settings: Mapping[str, Any] = MappingProxyType({})
) -> OptimizerFactory:
    """Return a factory of the optimizer called ``name``, one of
    :data:`gpumemnet.job.training_job.OPTIMIZERS`.

    Args:
        name: the name.
        implementation: one of :data:`~gpumemnet.job.training_job.OPTIMIZER_IMPLEMENTATIONS`.
        settings: arguments besides the usual ones.

    Raises:
        InvalidRequestError: PyTorch does not have this implementation of it, or one of the
            settings.
    """
    class_name, arguments = torch_call(name, implementation)
    made: type[Optimizer] = getattr(torch.optim, class_name)
    accepted = inspect.signature(made).parameters.keys()
    for setting in settings.keys() - accepted:
        raise InvalidRequestError(f"PyTorch's {made.__name__} has no {setting}", setting)
    if settings.get("nesterov") and not arguments.get("momentum"):
        raise InvalidRequestError("needs momentum: use the optimizer sgd_momentum", "nesterov")
    missing = arguments.keys() - accepted
    if missing:
        raise InvalidRequestError(
            f"PyTorch's {made.__name__} has no {implementation} implementation",
            "optimizer_implementation",
        )
    return lambda parameters: made(parameters, **arguments, **settings)


def same_optimizer(
    optimizer: Optimizer, meta_parameters: Mapping[int, nn.Parameter]
) -> OptimizerFactory:
    """Return a factory of an optimizer like ``optimizer`` whose parameters are replaced by meta
    parameters.

    Raises:
        InvalidRequestError: it holds parameters that are not the model's.
    """

    def build(parameters: Iterable[nn.Parameter]) -> Optimizer:
        groups = []
        for group in optimizer.param_groups:
            foreign = [p for p in group["params"] if id(p) not in meta_parameters]
            if foreign:
                raise InvalidRequestError(
                    f"{type(optimizer).__name__} holds parameters that are not the model's",
                    "optimizer",
                )
            groups.append({**group, "params": [meta_parameters[id(p)] for p in group["params"]]})
        accepted = inspect.signature(type(optimizer)).parameters
        defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        return type(optimizer)(groups, **defaults)

    return build


_LOOPS: Final = {True: "foreach", False: "for_loop", None: "default"}
"""Value of an optimizer's ``foreach`` → name of its implementation."""


def stated_optimizer(optimizer: Optimizer) -> dict[str, str]:
    """Return the fields of a job that name ``optimizer``; none where a job has no name for its
    class."""
    made, settings = type(optimizer).__name__, optimizer.defaults
    names = [
        name
        for name, rule in OPTIMIZER_RULES.items()
        if rule.torch_class == made and all(bool(settings.get(key)) for key in rule.settings)
    ]
    implementation = "fused" if settings.get("fused") else _LOOPS[settings.get("foreach")]
    return {"optimizer": names[-1], "optimizer_implementation": implementation} if names else {}


def optimizer_factory(
    options: TraceOptions, meta_parameters: Mapping[int, nn.Parameter]
) -> OptimizerFactory:
    """Return the factory for a name, an optimizer over the model's own parameters, or a factory.

    Raises:
        InvalidRequestError: it is none of these.
    """
    optimizer = options.optimizer if options.own_optimizer is None else options.own_optimizer
    if isinstance(optimizer, str):
        if optimizer not in OPTIMIZER_RULES:
            raise InvalidRequestError(
                f"must be one of {', '.join(OPTIMIZER_RULES)}, not {describe(optimizer)}",
                "optimizer",
            )
        return named_optimizer(
            optimizer, options.optimizer_implementation, options.optimizer_settings
        )
    if isinstance(optimizer, Optimizer):
        return same_optimizer(optimizer, meta_parameters)
    if callable(optimizer):
        return optimizer
    raise InvalidRequestError(
        "must be a name, an optimizer, or a function from parameters to an optimizer", "optimizer"
    )
