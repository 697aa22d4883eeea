"""The loss and the optimizer of a trace: by name, a user's own, or, for a loss, one that fits the
model's output.

A loss is a function of the model's output.  If it needs targets, it makes them as tensors of the
batch, because a training loop has them on the GPU too.

An optimizer is built as it would run on CUDA: a named one with its usual settings, or a user's own
over meta parameters.  PyTorch picks the foreach or the fused path only for parameters on a GPU;
:func:`~gpumemnet.torch_private.training.gpu_optimizers` lets it pick them here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpumemnet.errors import ExtractError, InvalidRequestError
from gpumemnet.extract.module_calls import tensors_in
from gpumemnet.job.layers import check_choice, describe
from gpumemnet.physics.optimizers import OPTIMIZER_RULES, torch_call
from gpumemnet.sandbox.user_code import definition
from gpumemnet.torch_private.names import is_torch_loss
from gpumemnet.tracing.api import LOSSES, TraceOptions

Target = Callable[[torch.Size, torch.dtype], Tensor]
"""Returns the target of this shape and type, which arrived on the GPU with the batch."""

Loss = Callable[[Any, Target], Tensor]
"""Called as ``loss(output, target)``."""

_OF_CLASSES: Final = (nn.CrossEntropyLoss, nn.NLLLoss)
"""Losses of ``torch.nn`` whose target is one class for each output."""
_OF_VALUES: Final = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.KLDivLoss,
)
"""Losses of ``torch.nn`` whose target is like the output."""
_NAMED: Final = {
    "cross_entropy": nn.CrossEntropyLoss,
    "mse": nn.MSELoss,
    "bce": nn.BCEWithLogitsLoss,
}


@dataclass(frozen=True, eq=False)
class TargetLoss:
    """A loss of the output and of targets on the GPU.

    Attributes:
        function: called as ``function(output, *targets)``.
        targets: tensors of the batch; only shapes and dtypes matter.
    """

    function: Callable[..., Tensor]
    targets: tuple[Tensor, ...]


def loss_function(loss: object) -> Loss:
    """Return the loss for a name of :data:`LOSSES`, a loss of ``torch.nn``, or a function of the
    model's output.

    Raises:
        InvalidRequestError: it is none of these.
    """
    if isinstance(loss, TargetLoss):
        return lambda output, target: scalar(
            loss.function(output, *[target(t.shape, t.dtype) for t in loss.targets])
        )
    if is_torch_loss(loss):
        return lambda output, target: scalar(_of_torch(loss, output, target))
    if callable(loss):
        return lambda output, target: scalar(
            loss(output), f"the loss {loss_name(loss, output)}{definition(loss)}"
        )
    if loss not in LOSSES:
        names = ", ".join(LOSSES)
        raise InvalidRequestError(
            f"must be one of {names}, or a function of the output, not {describe(loss)}", "loss"
        )
    return lambda output, target: _named_loss(str(loss), output, target)


def loss_name(loss: object, output: object) -> str:
    """Return the name of the loss that :func:`loss_function` uses for ``output``."""
    if isinstance(loss, TargetLoss):
        loss = loss.function
    if callable(loss):
        return str(getattr(loss, "__name__", type(loss).__name__))
    return _settled(str(loss), output)


def scalar(value: object, name: str = "the loss") -> Tensor:
    """Return ``value`` if it is a loss.

    Args:
        value: what a loss function returned.
        name: name of the loss, for the error message.

    Raises:
        ExtractError: it is not a tensor of one element with a gradient.
    """
    if not isinstance(value, Tensor):
        raise ExtractError(f"{name} must be a tensor, not {describe(value)}")
    if value.numel() != 1:
        raise ExtractError(
            f"{name} must be a scalar, not a tensor of shape {'x'.join(map(str, value.shape))}: reduce it"
        )
    if not value.requires_grad:
        raise ExtractError(
            f"{name} does not depend on any parameter that requires a gradient: nothing would be trained"
        )
    return value


def _settled(name: str, output: object) -> str:
    if name != "auto":
        return name
    if own_loss(output) is not None:
        return "the model's own"
    main = _main(output)
    return (
        "cross_entropy"
        if main.ndim >= 2 and main.shape[1 if main.ndim != 3 else -1] > 1
        else "mean"
    )


def own_loss(output: object) -> Tensor | None:
    """Return the loss that the model computes itself, ``output.loss`` or ``output["loss"]``;
    ``None`` if there is none."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return found if isinstance(found, Tensor) and found.numel() == 1 else None


def _named_loss(name: str, output: object, target: Target) -> Tensor:
    settled = _settled(name, output)
    if settled == "the model's own":
        return scalar(own_loss(output))
    named = _NAMED.get(settled)
    return scalar(_main(output).mean() if named is None else _of_torch(named(), output, target))


def _of_torch(loss: nn.Module, output: object, target: Target) -> object:
    main = _main(output)
    if isinstance(loss, _OF_CLASSES):
        return loss(*_with_classes(main, target))
    if isinstance(loss, _OF_VALUES):
        return loss(main, target(main.shape, main.dtype))
    name = type(loss).__name__
    raise ExtractError(
        f"loss: the target of {name} is unknown; give a function of the model's output instead"
    )


def _with_classes(main: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """Return outputs ``[batch, classes, …]``, and a class for each of them."""
    if main.ndim == 3:  # [batch, tokens, vocabulary], the output of language models
        main = main.flatten(0, 1)
    return main, target(torch.Size((main.shape[0], *main.shape[2:])), torch.long)


def _main(output: object) -> Tensor:
    """Return the first floating-point tensor that requires a gradient, else the first tensor.

    Raises:
        ExtractError: there is none.
    """
    tensors = tensors_in(output)
    if not tensors:
        raise ExtractError(
            "loss: the model's output holds no tensor; give a function of the output that returns a scalar"
        )
    return next(
        (tensor for tensor in tensors if tensor.requires_grad and tensor.is_floating_point()),
        tensors[0],
    )


OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


def named_optimizer(name: str, implementation: str = "default") -> OptimizerFactory:
    """Return a factory of the optimizer called ``name``, one of
    :data:`gpumemnet.job.training_job.OPTIMIZERS`.

    Args:
        name: the name.
        implementation: one of :data:`~gpumemnet.job.training_job.OPTIMIZER_IMPLEMENTATIONS`.

    Raises:
        InvalidRequestError: PyTorch does not have this implementation of it.
    """
    class_name, arguments = torch_call(name, implementation)
    made: type[Optimizer] = getattr(torch.optim, class_name)
    if arguments.keys() - inspect.signature(made).parameters.keys():
        raise InvalidRequestError(
            f"PyTorch's {made.__name__} has no {implementation} implementation",
            "optimizer_implementation",
        )
    return lambda parameters: made(parameters, **arguments)


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
        check_choice(optimizer, OPTIMIZER_RULES, "optimizer")
        return named_optimizer(optimizer, options.optimizer_implementation)
    if isinstance(optimizer, Optimizer):
        return same_optimizer(optimizer, meta_parameters)
    if callable(optimizer):
        return optimizer
    raise InvalidRequestError(
        "must be a name, an optimizer, or a function from parameters to an optimizer", "optimizer"
    )
