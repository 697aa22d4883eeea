"""A model on meta tensors: what it is called with, its weights, and which of its modules runs; the
tensors in what modules and functions take and return.  Extraction and tracing share them.

Inputs are meta tensors ``[batch, …]`` with the job's batch size.  :func:`with_meta_tensors` replaces
parameters and buffers as ``module.to(device)`` does with CUDA tensors: the weights are not read or
copied and get no gradients.  Small buffers keep their values, because models read them, such as
position tables and masks.  Global module hooks also see scripted modules, which have no hooks of
their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from gpumemnet.errors import ExtractError
from gpumemnet.extract.factory import check_batch_size
from gpumemnet.extract.placement import is_small
from gpumemnet.job.layers import listed
from gpumemnet.physics.element_types import IMAGE_DIMENSIONS
from gpumemnet.sandbox.user_code import UnknownValueError
from gpumemnet.torch_private.names import (
    Arguments,
    Keywords,
    own_buffers,
    own_parameters,
    storage_id,
)


@dataclass(frozen=True)
class ModelInputs:
    """What the model is called with: meta tensors, tensors that keep their values, and other
    arguments of the factory, unchanged.

    Attributes:
        args, kwargs: arguments of the call.
        batch_size: samples in the batch, the first dimension of the tensors.
        note: what was done to inputs of another batch size, or an empty text.
    """

    args: Arguments
    kwargs: Keywords
    batch_size: int
    note: str = ""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in order."""
        return [tensor for _, tensor in _named_tensors((*self.args, self.kwargs))]

    def shapes_of_fault(self, fault: BaseException) -> str:
        """Return the shapes as the end of the sentence about ``fault``, such as ``; inputs: 8x128
        (2 times), 8``.

        They say nothing about code that needs values.
        """
        if isinstance(fault, UnknownValueError):
            return ""
        times = Counter("x".join(map(str, tensor.shape)) or "()" for tensor in self.tensors)
        texts = [
            shape if count == 1 else f"{shape} ({count} times)" for shape, count in times.items()
        ]
        return f"; inputs: {listed(texts)}"

    @property
    def elements_per_sample(self) -> int:
        """Number of elements of all inputs per sample, at least 1."""
        return max(1, round(sum(tensor.numel() for tensor in self.tensors) / self.batch_size))

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ModelInputs:
        """Return the inputs with ``change`` applied to every tensor."""
        args, kwargs = map_tensors((self.args, self.kwargs), change)
        return replace(self, args=args, kwargs=kwargs)

    def resized(self, batch_size: int) -> ModelInputs:
        """Return the inputs with ``batch_size`` samples; tensors without a batch dimension are
        unchanged."""
        if batch_size == self.batch_size:
            return self

        def resize(tensor: Tensor) -> Tensor:
            if tensor.ndim == 0 or tensor.shape[0] != self.batch_size:
                return tensor
            if not tensor.is_meta:  # values that models read: further samples repeat them
                return tensor[torch.arange(batch_size) % self.batch_size]
            return tensor.new_empty((batch_size, *tensor.shape[1:]))

        return replace(self.mapped(resize), batch_size=batch_size)


def as_model_inputs(inputs: object, batch_size: int | None) -> ModelInputs:
    """Return what a user calls a model with, as :class:`ModelInputs`; those that are already stay
    as they are.

    Args:
        inputs, batch_size: see :func:`inputs_from_example`.

    Raises:
        ExtractError, InvalidJobError: as :func:`inputs_from_example`.
    """
    return inputs if isinstance(inputs, ModelInputs) else inputs_from_example(inputs, batch_size)


def inputs_from_example(example: object, batch_size: int | None) -> ModelInputs:
    """Return meta tensors with the shapes of ``example``; small tensors of whole numbers, such as
    masks, keep its values, because models read them.

    The first dimension of the first tensor is the batch size.  For another ``batch_size``, every
    tensor whose first dimension equals the example's batch size is resized, by repeating its
    samples; the others are unchanged, and the note lists both.

    Args:
        example: a tensor, a tuple or list of arguments, or a mapping of keyword arguments.
        batch_size: samples per batch; that of the example by default.

    Raises:
        ExtractError: the example holds no tensor with a batch dimension.
        InvalidJobError: the batch size is out of range.
    """
    check_batch_size(batch_size)
    kwargs = dict(example) if isinstance(example, Mapping) else {}
    args: Arguments = (
        () if kwargs else tuple(example) if isinstance(example, tuple | list) else (example,)
    )
    named = [(name, tensor) for name, tensor in _named_tensors(kwargs or args) if tensor.ndim > 0]
    if not named:
        raise ExtractError(
            "inputs: no tensor has a batch dimension; give a tensor, a tuple of tensors or a dict of keyword tensors"
        )
    example_batch = named[0][1].shape[0]
    if example_batch == 0:
        raise ExtractError("inputs: the batch is empty; the first dimension must be at least 1")
    wanted = example_batch if batch_size is None else batch_size

    def to_meta(tensor: Tensor) -> Tensor:
        if not tensor.is_meta and keeps_values(tensor):
            return tensor.cpu()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    note = ""
    if wanted != example_batch:
        grown = ", ".join(name for name, tensor in named if tensor.shape[0] == example_batch)
        kept = ", ".join(name for name, tensor in named if tensor.shape[0] != example_batch)
        note = f"The factory's inputs hold {example_batch} samples; at batch size {wanted}, resized: {grown}"
        note += f"; kept as they are: {kept}." if kept else "."
    return ModelInputs(args, kwargs, example_batch, note).mapped(to_meta).resized(wanted)


def keeps_values(tensor: Tensor) -> bool:
    """Whether an input is small and of whole numbers: positions, token numbers, masks."""
    return not (tensor.is_floating_point() or tensor.is_complex()) and is_small(tensor)


def _named_tensors(value: object, name: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        return [(name or "input", value)]
    items: list[tuple[str, object]] = []
    if isinstance(value, Mapping):
        items = [(str(key), entry) for key, entry in value.items()]
    elif isinstance(value, tuple | list):
        items = [(f"input {index}", entry) for index, entry in enumerate(value)]
    return [pair for key, entry in items for pair in _named_tensors(entry, f"{name} {key}".strip())]


class ModulePath:
    """Context that follows which module of ``model`` runs.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: MutableMapping[nn.Module, str] = WeakIdKeyDictionary(  # some define ==
            {module: name for name, module in model.named_modules()}
        )
        self.entered: Callable[[nn.Module], None] = lambda module: None
        """Called with each module before its forward pass."""
        self.left: Callable[[nn.Module, tuple[object, object], object], None] = lambda *left: None
        """Called with each module after its forward pass, with its arguments and its output."""
        self._stack: list[nn.Module] = []
        self._handles: list[Any] = []

    @property
    def running(self) -> nn.Module | None:
        """The innermost module that is running."""
        return self._stack[-1] if self._stack else None

    @property
    def path(self) -> str:
        """Dotted path of the innermost module that is running; empty for the model itself and
        outside of it."""
        return self.path_of(self._stack[-1]) if self._stack else ""

    @property
    def depth(self) -> int:
        """Number of nested running modules."""
        return len(self._stack)

    def path_of(self, module: nn.Module) -> str:
        """Return the dotted path of ``module``; empty if it is not part of the model."""
        return self._names.get(module, "")

    def forget(self) -> None:
        """Forget all running modules: a module that raised has left its entry."""
        self._stack.clear()

    def __enter__(self) -> ModulePath:
        self._handles = [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, with_kwargs=True),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: object) -> None:
        if module not in self._names:
            return
        self._stack.append(module)
        self.entered(module)

    def _leave(self, module: nn.Module, args: object, kwargs: object, output: object) -> None:
        if module not in self._names:
            return
        # A module that raised, and whose caller continued, has left its entry; a step within one has
        # forgotten all.
        while self._stack and self._stack.pop() is not module:
            pass
        self.left(module, (args, kwargs), output)


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in nested sequences, mappings and dataclasses, each once, in order."""
    found = {id(tensor): tensor for tensor in _iterate_tensors(value)}
    return list(found.values())


def _iterate_tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _iterate_tensors(entry)
    elif isinstance(value, list | tuple | set | frozenset):
        for entry in value:
            yield from _iterate_tensors(entry)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _iterate_tensors(getattr(value, field.name, None))


def map_tensors(value: Any, change: Callable[[Any], Any], *others: type) -> Any:
    """Return ``value`` with ``change`` applied to every tensor, and to what is of ``others``, in
    nested sequences and mappings."""
    if isinstance(value, (Tensor, *others)):
        return change(value)
    if isinstance(value, dict):
        changed = type(value)()
        changed.update((key, map_tensors(entry, change, *others)) for key, entry in value.items())
        return changed
    if isinstance(value, Mapping):
        return {key: map_tensors(entry, change, *others) for key, entry in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(entry, change, *others) for entry in value))
    if isinstance(value, tuple | list):
        return type(value)(map_tensors(entry, change, *others) for entry in value)
    return value


@dataclass(frozen=True)
class MetaTensors:
    """The meta tensors of a model.

    Attributes:
        parameters: meta parameter by the ``id`` of the model's own.
        moves: ``(tensor, module path, whether it is a parameter)`` for all that goes to the GPU, in
            the order of ``module.to(device)``.
    """

    parameters: dict[int, nn.Parameter]
    moves: list[tuple[Tensor, str, bool]]


@contextmanager
def with_meta_tensors(
    model: nn.Module, dtype: torch.dtype | None = None, channels_last: bool = False
) -> Iterator[MetaTensors]:
    """Context in which the model's parameters and buffers are meta tensors.

    Args:
        model: the model.
        dtype: floating-point type to convert to, as by ``model.to(dtype)``.
        channels_last: whether 4-dimensional parameters take the NHWC memory format.

    Yields:
        the meta tensors.
    """
    parameters: dict[int, nn.Parameter] = {}
    new_of: dict[int, Tensor] = {}
    storages: dict[int, Tensor] = {}
    moves: list[tuple[Tensor, str, bool]] = []
    undo: list[tuple[dict[str, Any], str, Tensor]] = []

    def convert(tensor: Tensor, real: bool) -> Tensor:
        target_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if real:
            return tensor.to(target_dtype, copy=True)
        shared = None if tensor.is_meta else storages.get(storage_id(tensor))
        if (
            shared is not None
            and target_dtype == shared.dtype
            and shared.numel() >= tensor.storage_offset() + tensor.numel()
        ):
            return shared.reshape(-1).as_strided(
                tensor.shape, tensor.stride(), tensor.storage_offset()
            )
        layout = (
            torch.channels_last
            if channels_last and tensor.ndim == IMAGE_DIMENSIONS
            else torch.preserve_format
        )
        converted = torch.empty_like(
            tensor, dtype=target_dtype, device="meta", memory_format=layout
        )
        if not tensor.is_meta:
            storages[storage_id(tensor)] = converted
        return converted

    def replace(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            replace(child, f"{path}.{name}" if path else name)
        if isinstance(module, torch.jit.ScriptModule):
            return
        tables: list[dict[str, Any]] = [own_parameters(module), own_buffers(module)]
        for is_buffer, own in enumerate(tables):
            for name, tensor in own.items():
                if tensor is None or nn.parameter.is_lazy(tensor):
                    continue
                if id(tensor) not in new_of:
                    is_real = is_buffer and not tensor.is_meta and is_small(tensor)
                    made = convert(tensor.detach(), bool(is_real))
                    if not is_buffer:
                        made = parameters[id(tensor)] = nn.Parameter(made, tensor.requires_grad)
                    new_of[id(tensor)] = made
                    moves.append((made, path, not is_buffer))
                undo.append((own, name, tensor))

    with torch.no_grad():
        replace(model, "")
    try:
        for tensors, name, original in undo:
            tensors[name] = new_of[id(original)]
        yield MetaTensors(parameters, moves)
    finally:
        for tensors, name, original in undo:
            tensors[name] = original
