"""Private and replaced names of ``torch.nn``, ``torch.jit`` and ``torch.utils.checkpoint``."""

from __future__ import annotations

from typing import Any, Final, TypeGuard

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from gpumemnet.torch_private.names import check, declare

CHECKPOINT_FILE: Final = str(torch.utils.checkpoint.__file__)
"""The file whose frames say that a model recomputes a part of itself."""

OWN_DICTS: Final = frozenset(
    name for name, value in vars(nn.Module()).items() if isinstance(value, dict)
)
"""Attributes of every module that are dicts: its parameters, its children, its hooks."""

LOAD: Final = declare("torch:load", "open files of weights without reading the weights")
SET_DEFAULT_DEVICE: Final = declare(
    "torch:set_default_device", "keep code from choosing a device for everything"
)
SET_CUDA_DEVICE: Final = declare(
    "torch.cuda:set_device", "let code choose a GPU where there is none"
)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The parameters of ``module`` itself, without its children's; changing the dict changes the
    module."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of ``module`` itself, without its children's; changing the dict changes the
    module."""
    return module._buffers


def forward_hooks(module: nn.Module) -> list[object]:
    """The hooks that run before and after the forward pass of ``module`` itself."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` was compiled, by ``torch.compile`` or by its method ``compile``."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def is_torch_loss(value: object) -> TypeGuard[nn.Module]:
    """Whether ``value`` is a loss of ``torch.nn``."""
    return isinstance(value, nn.modules.loss._Loss)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether ``module`` is a batch norm of any number of dimensions."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _probe_hooks() -> None:
    module = nn.Identity()
    hooks = [lambda *arguments: None, lambda *arguments: None]
    module.register_forward_pre_hook(hooks[0])
    module.register_forward_hook(hooks[1])
    check(forward_hooks(module) == hooks, f"a module's hooks are {forward_hooks(module)}")
    check(not is_compiled(module), "a plain module looks compiled")
    module._compiled_call_impl = print
    check(is_compiled(module), "a compiled module looks plain")


def _probe_tables() -> None:
    module = nn.BatchNorm1d(2, device="meta")
    check(
        list(own_parameters(module)) == ["weight", "bias"],
        f"a batch norm's parameters are {list(own_parameters(module))}",
    )
    check(
        "running_mean" in own_buffers(module),
        f"a batch norm's buffers are {list(own_buffers(module))}",
    )
    replacement = nn.Parameter(torch.empty(2, device="meta"))
    own_parameters(module)["weight"] = replacement
    check(module.weight is replacement, "a module does not use the parameter that its dict holds")


def _probe_checkpoint() -> None:
    code: Any = torch.utils.checkpoint.CheckpointFunction.forward.__code__
    check(code.co_filename == CHECKPOINT_FILE, f"checkpoints run in {code.co_filename}")


declare(
    "torch.nn:Module.__init__",
    "put meta tensors in place of a model's parameters and buffers",
    probe=_probe_tables,
)
declare(
    "torch.nn:Module.register_forward_hook", "find hooks that would run twice", probe=_probe_hooks
)
declare(
    "torch.utils.checkpoint:__file__",
    "notice that a model recomputes a part of itself",
    probe=_probe_checkpoint,
)
declare("torch.nn.modules.loss:_Loss", "know a loss of torch.nn")
declare("torch.nn.modules.batchnorm:_BatchNorm", "know a batch norm")
