"""The models that a script runs; the one that it trains can be taken out, to be planned by itself."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gpumemnet.errors import ExtractError
from gpumemnet.extract.module_calls import (
    ModelInputs,
    ModulePath,
    keeps_values,
    map_tensors,
    tensors_in,
)
from gpumemnet.physics.element_types import AUTOCAST_TYPES
from gpumemnet.torch_private.names import (
    is_part,
    own_buffers,
    own_parameters,
    part_on_rank,
    viewed,
)
from gpumemnet.torch_private.script import without_modes
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.recorder import Recorder
from gpumemnet.tracing.script.optimizers import parameters_of

_SEQUENCE_DIMENSIONS: Final = 3
GENERATION: Final = "generation"
"""Name of the phase of a generation, token by token."""
_SURE: Final = 8
"""Passes after which one that is as long as the last is a token, too: its prompt was cut."""


class ScriptModules(ModulePath):
    """The modules that a script runs: each outermost one is a model, named by its class.

    Args:
        starting: called with its arguments before an outermost module runs.
    """

    def __init__(self, starting: Callable[[object], None]) -> None:
        super().__init__(nn.Identity())
        self._starting = starting
        self._names.clear()
        self._models: list[weakref.ref[nn.Module]] = []
        self.model_names: list[str] = []
        """Class names of the models with parameters, without their wrapper for several GPUs."""

    @property
    def models(self) -> list[nn.Module]:
        """The models that the script has not dropped."""
        return [model for model in (one() for one in self._models) if model is not None]

    def learn(self, module: nn.Module) -> None:
        """Add ``module`` as a model, unless it is part of a known one."""
        if module in self._names:
            return
        inner = getattr(module, "_orig_mod", None)
        if isinstance(inner, nn.Module):  # of torch.compile
            self.learn(inner)
            self._names[module] = self._names[inner]
            return
        self._models.append(weakref.ref(module))
        root = type(module).__name__
        if next(iter(module.parameters()), None) is not None:
            alone = module.module if isinstance(module, DistributedDataParallel) else module
            self.model_names.append(type(alone).__name__.removeprefix("FSDP"))
        for name, child in module.named_modules():
            self._names.setdefault(child, f"{root}.{name}" if name else root)

    def _enter(self, module: nn.Module, args: object) -> None:
        if not self._stack:
            self._starting(args)
            self.learn(module)
        super()._enter(module, args)


class SampleCount:
    """How many samples models are called with.

    Args:
        of_loaders: batch sizes of the script's data loaders.
    """

    def __init__(self, of_loaders: Container[int]) -> None:
        self._of_loaders = of_loaders
        self.known: int | None = None
        """Samples that the model got which the first backward pass trains most of."""
        self._by_model: dict[weakref.ref[nn.Module], int] = {}
        """Samples that models got before that pass."""
        self._inner: int | None = None
        """Samples that the first module with parameters got inside the running model."""
        self._second_dimension: int | None = None

    @property
    def batch_size(self) -> int | None:
        """Samples that the model got in training, as far as that is known."""
        return self.known or next(iter(self._by_model.values()), None)

    def learn(self, module: nn.Module, given: list[Tensor], *, is_model: bool) -> None:
        """Learn the number of samples from what a module was called with: the second dimension of
        ``[time, batch, …]``."""
        has_parameters = next(iter(module.parameters()), None) is not None
        size = self._inner
        if given:
            shape = given[0].shape
            if size is None and has_parameters:
                self._inner = shape[0]
            if getattr(module, "batch_first", None) is False and len(shape) == _SEQUENCE_DIMENSIONS:
                self._second_dimension = shape[1]
            firsts = [each.shape[0] for each in given]
            known = [each for each in firsts if each in self._of_loaders]
            whole = viewed(given[0]).shape  # of points on rays, frames of videos
            if len(whole) > len(shape) and whole.numel() == shape.numel():
                firsts = [whole[0]]
            size = [*known, *firsts][0]  # points have offsets
            if len(shape) > 1 and self._is_batch(shape[1]) and not self._is_batch(shape[0]):
                size = shape[1]
        if is_model:
            self._inner = None
        if is_model and has_parameters and size is not None:
            reference = weakref.ref(module)  # an agent acts on one sample before it trains
            self._by_model[reference] = max(size, self._by_model.get(reference, 0))

    def _is_batch(self, size: int) -> bool:
        return size == self._second_dimension or size in self._of_loaders

    def settle(self, leaves: set[int]) -> None:
        """Take the number of samples from the model with most parameters among ``leaves``: others
        may only have acted, or are parts that ran alone before."""
        held: dict[int, int] = {}
        for reference, size in self._by_model.items():
            model = reference()
            own = () if model is None else model.parameters()
            held[size] = max(held.get(size, 0), sum(id(each) in leaves for each in own))
        size = max(held, key=held.__getitem__, default=0)
        if held.get(size):
            self.known = size
            self._by_model.clear()


class ModelTensors:
    """Tells the recorder which tensors are parameters, buffers, gradients and optimizer state."""

    def __init__(self, recorder: Recorder, modules: ScriptModules) -> None:
        self._recorder = recorder
        self._modules = modules
        self._parameters: dict[int, tuple[weakref.ref[Tensor], str]] = {}

    def know(self, parameter: Tensor, owner: str) -> bool:
        """Record that ``parameter`` is on the GPU; return whether it was unknown.

        The parameter is not kept alive, because the script may replace it.
        """
        known = self._parameters.get(id(parameter))
        if known is not None and known[0]() is parameter:
            return False
        self._parameters[id(parameter)] = (weakref.ref(parameter), owner)
        return True

    def learn(self, parameters: Iterable[Tensor]) -> None:
        """Learn parameters that no module has shown, such as those that never were unsharded."""
        for parameter in parameters:
            if self.know(parameter, ""):
                self._recorder.classify((part_on_rank(parameter),), "parameter", "")

    def classify(self, optimizer: Optimizer, *, of_engine: bool) -> None:
        """Classify the parameters of an optimizer that has stepped, their gradients and state."""
        self.learn(parameters_of(optimizer))
        self.classify_models()
        self.classify_gradients(of_engine=of_engine)
        for parameter, state in optimizer.state.items():
            owner = self._parameters.get(id(parameter), (None, ""))[1]
            self._recorder.classify(map(part_on_rank, tensors_in(state)), "optimizer_state", owner)

    def classify_gradients(self, *, of_engine: bool) -> None:
        """Classify gradients; those that are views of an engine's bucket are none of their own."""
        for reference, owner in list(self._parameters.values()):
            parameter = reference()
            if parameter is None or parameter.grad is None:
                continue
            if not (of_engine and is_part(parameter.grad)):
                self._recorder.classify((part_on_rank(parameter.grad),), "gradient", owner)

    def classify_models(self) -> None:
        """Classify the models' tensors: the script may have converted them, or put others in their
        place."""
        for module in (each for model in self._modules.models for each in model.modules()):
            owner = self._modules.path_of(module)
            for parameter in own_parameters(module).values():
                if parameter is not None:
                    self.know(parameter, owner)
                    self._recorder.classify((part_on_rank(parameter),), "parameter", owner)
            for buffer in own_buffers(module).values():
                if buffer is not None:
                    self._recorder.classify((part_on_rank(buffer),), "buffer", owner)


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
            self._optimizer = optimizer if own & set(map(id, parameters_of(optimizer))) else None

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


class Generation:
    """Passes without gradients whose inputs grow by one, or have one more after a longer one."""

    def __init__(self) -> None:
        self._shapes: WeakKeyDictionary[nn.Module, list[torch.Size]] = WeakKeyDictionary()
        self._first = 0
        """Identity of the module whose passes are the tokens."""
        self._live: list[int] = []
        """Bytes on the GPU after each pass that generated."""

    @property
    def phase(self) -> str:
        """Name of the phase of the next pass."""
        return GENERATION if len(self._live) > 1 else "evaluation"

    @property
    def sentence(self) -> str:
        """What a generation takes that was not seen to its end."""
        passes = len(self._live)
        each = max(self._live[-1] - self._live[0], 0) / max(passes - 1, 1)
        return (
            f"the trace ended within a generation, after {passes:,} tokens of it: each further token takes {each / 1024:,.1f} KiB "
            "more, and they are not in the answer"
        )

    def passed(self, module: nn.Module, arguments: object, live_bytes: int) -> None:
        """A pass without gradients has ended.

        Args:
            module: a model, or a part of one that the script calls by itself.
            arguments: its own.
            live_bytes: bytes on the GPU now.
        """
        is_known, before = module in self._shapes, self._shapes.get(module, [])
        shapes = self._shapes[module] = [each.shape for each in tensors_in(arguments)]
        pairs = [
            (old[1], new[1])
            for old, new in zip(before, shapes, strict=False)
            if len(new) == len(old) > 1 and old[0] == new[0]
        ]
        is_next = any(new == old + 1 or new == 1 < old for old, new in pairs)
        # Batches that are sorted by length are now as long, now longer by one.
        is_token = len(self._live) >= _SURE or any(new == 1 for _, new in pairs)
        is_first = self._first in (0, id(module))
        if is_next or (self._live and before == shapes and is_token):
            if is_first:
                self._first = id(module)
                self._live.append(live_bytes)
        elif is_first or not is_known:
            self._first = 0
            self._live.clear()
