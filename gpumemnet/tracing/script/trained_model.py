"""The model that a script trains, taken out of its run, to be traced and planned by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpumemnet.errors import ExtractError
from gpumemnet.extract.module_calls import ModelInputs, keeps_values, map_tensors
from gpumemnet.physics.element_types import AUTOCAST_TYPES
from gpumemnet.torch_private.script import without_modes
from gpumemnet.tracing.api import TraceOptions


class TrainedModel:
    """The first outermost module that trains, and how; empty until the script has trained it."""

    def __init__(self) -> None:
        self._module: nn.Module | None = None
        self._arguments: Any = ((), {})
        self._precision = "fp32"
        self._optimizer: Optimizer | None = None

    def called(self, module: nn.Module, arguments: object) -> None:
        """An outermost module was called with gradients on.

        Of what it was called with only copies without memory are kept: the script's own tensors are
        freed when the script drops them.
        """
        is_trained = any(each.requires_grad for each in module.parameters())
        if self._module is not None or not is_trained:
            return
        self._module = getattr(module, "_orig_mod", module)
        if torch.is_autocast_enabled("cuda"):
            dtype = str(torch.get_autocast_dtype("cuda")).removeprefix("torch.")
            self._precision = {type_: name for name, type_ in AUTOCAST_TYPES.items()}[dtype]
        with without_modes():
            self._arguments = map_tensors(arguments, _copied)

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        if self._module is not None and self._optimizer is None:
            own = set(map(id, self._module.parameters()))
            held = [each for group in optimizer.param_groups for each in group["params"]]
            self._optimizer = optimizer if own & set(map(id, held)) else None

    def training(
        self, options: TraceOptions, batch_size: int
    ) -> tuple[nn.Module, ModelInputs, TraceOptions, str]:
        """Return the model, what it is called with, how it is trained, and that in words.

        Raises:
            ExtractError: the script has trained no module that can be called by itself.
        """
        module, optimizer = self._module, self._optimizer
        if module is None or optimizer is None:
            raise ExtractError(
                "no module was called whose parameters an optimizer of the script updates: "
                "write a function that returns (model, inputs), and plan train.py:function"
            )
        args, kwargs = self._arguments
        how = replace(options, own_optimizer=optimizer, precision=self._precision)
        words = f"{type(module).__name__}, {type(optimizer).__name__}, {self._precision}"
        return module, ModelInputs(args, kwargs, batch_size), how, words


def _copied(tensor: Tensor) -> Tensor:
    if not tensor.is_meta and keeps_values(tensor):
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
