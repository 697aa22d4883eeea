"""Lists the layers of a model in execution order: leaf modules and functions outside of them, with
outputs and parameters.

The model runs once on meta tensors, observed by module hooks and a ``TorchFunctionMode``.  A module
with a layer kind is one call.  Other modules are looked into, so a functional network gives the
same calls as the same network of modules.  Each parameter belongs to the first call that uses it,
also through views and through functions of parameters only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from gpumemnet.extract.attention import (
    AttentionStep,
    KernelChoice,
    attention_call,
    attention_steps,
    math_kernel_steps,
    module_call,
)
from gpumemnet.extract.checkpointing import blocks, checkpoint_calls
from gpumemnet.extract.layer_kinds import (
    LOSS,
    NOT_A_LAYER,
    kind_of_activation,
    kind_of_function,
    kind_of_module,
    kind_with_number,
)
from gpumemnet.extract.module_calls import ModulePath, tensors_in, with_meta_tensors
from gpumemnet.extract.placement import MissingValues, placement
from gpumemnet.physics.attention_kernels import MATH, AttentionCall
from gpumemnet.physics.saved_tensors import RESERVED_PER_UNIT, kept_in_place, reserve_elements
from gpumemnet.torch_private.names import (
    Arguments,
    Function,
    storage_id,
)

_DROPOUTS: Final = frozenset({"dropout", "alpha_dropout"})
_ATTENTION: Final = frozenset({"attention", "cross_attention"})
_RECURRENT: Final = frozenset({"lstm", "gru", "rnn"})


class _Mark(NamedTuple):
    """The origin of a tensor: the model's inputs, only these parameters (by ``id``), or neither."""

    activation: bool
    parameters: frozenset[int] = frozenset()


_ACTIVATION: Final = _Mark(True)


@dataclass(frozen=True, slots=True)
class Call:
    """One executed layer.

    Attributes:
        kind: layer kind, see :data:`gpumemnet.job.layers.LAYER_GROUPS`.
        shape: shape of its (first) output, batch dimension included.
        elements: elements of all its outputs, for the whole batch.
        sequence_length: query positions of attention, or steps of a recurrent layer; else ``None``.
        joins_activations: whether it has two or more activations as inputs.
        trains: whether any parameter that it uses receives gradients.
        block: number of the checkpointed block that it runs in, from 1 in execution order; 0 in
            none; ``None`` for a model without a stack of blocks.
        part_of: the activation function that it is a step of, where a module of that name writes it
            out, or that it is in place, where another kind says what it keeps; else ``None``.
        path: dotted path of the module that executed it; empty for the model itself.
        parameters: elements of the parameters that it is the first to use.
    """

    kind: str
    shape: tuple[int, ...]
    elements: int
    sequence_length: int | None = None
    joins_activations: bool = False
    part_of: str | None = None
    path: str = ""
    parameters: int = 0
    trains: bool = False
    block: int | None = None


@dataclass(frozen=True, slots=True)
class Walk:
    """The result of the walk.

    Attributes:
        calls: in execution order.
        indirect: names of parameters whose use cannot be followed; counted with the first call of
            their module.
        unused: names of parameters that no executed module owns; counted with no call.
        unseen: paths of modules that cannot be looked into, such as scripted ones; each is one call
            of kind ``other``.
        losses: number of loss functions inside the model, which are not calls.
        checkpointed: whether the model recomputes parts of itself through
            ``torch.utils.checkpoint``.
        attention_kernel: the kernel of most attention, by output elements; ``None`` where no call
            leaves PyTorch the choice.
    """

    calls: tuple[Call, ...]
    indirect: tuple[str, ...]
    unused: tuple[str, ...]
    unseen: tuple[str, ...]
    losses: int
    checkpointed: bool
    attention_kernel: str | None


class ForwardError(Exception):
    """The model's forward pass raised.

    Attributes:
        fault: what it raised.
        path: dotted path of the innermost module that was running.
    """

    def __init__(self, fault: Exception, path: str) -> None:
        super().__init__(f"{path}: {fault}")
        self.fault = fault
        self.path = path


def walk(
    model: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    attention: KernelChoice,
    missing_values: MissingValues | None = None,
) -> Walk:
    """Run ``model`` once in training mode on meta tensors; its mode and its buffers are restored.

    Args:
        model: the model.
        args, kwargs: what it is called with.
        attention: which kernel ``scaled_dot_product_attention`` runs; the steps of the math kernel
            are layers.
        missing_values: see :func:`gpumemnet.extract.placement.placement`.

    Raises:
        ForwardError: the forward pass raises.
    """
    modes = {module: module.training for module in model.modules()}
    path = ""
    try:
        with torch.enable_grad(), placement(missing_values):
            model.train()
            if any(nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
                model(*args, **kwargs)
            storages = {
                id(parameter): storage_id(parameter)
                for parameter in model.parameters()
                if not (parameter.is_meta or nn.parameter.is_lazy(parameter))
            }
            with with_meta_tensors(model) as meta_tensors:
                by_storage = {
                    storages[key]: parameter
                    for key, parameter in meta_tensors.parameters.items()
                    if key in storages
                }
                recorder = _Recorder(model, by_storage, attention)
                try:
                    recorder.run(args, kwargs)
                finally:
                    path = recorder.path
    except Exception as error:
        raise ForwardError(error, path) from error
    finally:
        for module, training in modes.items():
            module.training = training
    return recorder.finish()


class _Recorder:
    """Collects the calls while the model runs."""

    def __init__(
        self, model: nn.Module, meta_parameters: Mapping[int, nn.Parameter], attention: KernelChoice
    ) -> None:
        self._model = model
        self._attention = attention
        self._kernels: Counter[str] = Counter()
        self._modules = ModulePath(model)
        self._modules.entered, self._modules.left = self._enter, self._leave
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._trained = {id(each) for each in model.parameters() if each.requires_grad}
        self._blocks = set(blocks(model))
        self._block_count = 0
        self._block_depth = 0  # how deep the block that runs is nested; 0 in none
        self._unclaimed = {
            id(parameter): parameter
            for parameter in model.parameters()
            if not nn.parameter.is_lazy(parameter)
        }
        self._by_storage = {
            storage: frozenset({id(parameter)}) for storage, parameter in meta_parameters.items()
        }
        self._marks: MutableMapping[Tensor, _Mark] = WeakTensorKeyDictionary()
        for key, parameter in self._unclaimed.items():
            storage = storage_id(parameter)
            self._by_storage[storage] = self._by_storage.get(storage, frozenset()) | {key}
        self._stack: list[tuple[str | None, int]] = []
        self._calls: list[Call] = []
        self._unseen: list[str] = []
        self._losses = 0
        self._checkpointed = False
        self._has_fused_norm = False  # whether the norm that runs has called PyTorch's own

    @property
    def path(self) -> str:
        """Path of the innermost module that is running."""
        return self._modules.path

    @property
    def _opaque(self) -> bool:
        """Whether a module with a layer kind is running, whose inside is not recorded."""
        return any(kind is not None for kind, _ in self._stack)

    def run(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Call the model and record its calls; results of these arguments are activations."""
        for tensor in tensors_in((args, kwargs)):
            self._marks[tensor] = _ACTIVATION
        with self._modules, _FunctionWatch(self):
            self._model(*args, **kwargs)

    def _enter(self, module: nn.Module) -> None:
        del self._stack[self._modules.depth - 1 :]  # entries of modules that raised
        kind = kind_of_module(module)
        if not self._opaque:
            self._has_fused_norm = False
        self._stack.append((kind, len(self._calls)))
        if self._modules.depth <= self._block_depth:  # a block that raised
            self._block_depth = 0
        if not self._block_depth and module in self._blocks:
            self._block_count += 1
            self._block_depth = self._modules.depth

    def _leave(self, module: nn.Module, arguments: tuple[object, object], output: object) -> None:
        self._record_module(module, arguments, output)
        if self._modules.depth < self._block_depth:
            self._block_depth = 0

    def _record_module(
        self, module: nn.Module, arguments: tuple[object, object], output: object
    ) -> None:
        kind, first_call = self._stack[self._modules.depth]
        del self._stack[self._modules.depth :]
        if self._opaque:
            return
        inputs, outputs = tensors_in(arguments), tensors_in(output)
        unseen = [
            tensor
            for tensor in outputs
            if tensor not in self._marks and not self._parameters_in(tensor)
        ]
        own = frozenset(id(parameter) for parameter in module.parameters())
        if kind == LOSS:
            self._losses += 1
            kind = "other" if own & self._unclaimed.keys() else NOT_A_LAYER
        if (
            kind is None
            and len(self._calls) == first_call
            and unseen
            and not _aliases(inputs, outputs)
        ):
            kind = kind_of_activation(module) or "other"
        if kind is None and (written_out := kind_of_activation(module)):
            for at in range(first_call, len(self._calls)):
                self._calls[at] = replace(self._calls[at], part_of=written_out)
        if kind == "other":
            self._unseen.append(self._modules.path_of(module) or type(module).__name__)
        passed_through = kind == "drop_path" and all(any(o is i for i in inputs) for o in outputs)
        if kind in _DROPOUTS:
            passed_through = getattr(module, "p", None) == 0
        if (
            kind == "rms_norm"
            and not self._has_fused_norm
            and next(iter(module.parameters()), None) is not None
        ):
            # A norm of elementary operations: its result is a tensor, which the product with the
            # weight keeps.
            self._record(kind, module, outputs, (), inputs)
            self._record("multiply", module, outputs, own, inputs)
        elif kind is not None and kind != NOT_A_LAYER and not passed_through:
            self._record(kind, module, outputs, own, inputs)
        for tensor in unseen:
            self._marks[tensor] = _ACTIVATION

    def saw_function(
        self,
        func: Function,
        args: Arguments,
        kwargs: Mapping[str, Any],
        output: object,
    ) -> None:
        """Record a function that was called outside of modules with a layer kind."""
        if self._opaque:
            self._has_fused_norm |= "rms_norm" in getattr(func, "__name__", "")
            return
        if not (outputs := tensors_in(output)):
            return
        inputs = tensors_in((args, kwargs))
        marks = [self._mark(tensor) for tensor in inputs]
        used = frozenset[int]().union(*(mark.parameters for mark in marks))
        activation = any(mark.activation for mark in marks)
        mark = _Mark(activation, frozenset() if activation else used)
        module = self._modules.running or self._model
        if activation and func is F.multi_head_attention_forward:
            is_math = self._runs_math_kernel(module_call(args, kwargs), outputs[0])
            self._record_attention(module, attention_steps(args, kwargs, is_math))
        elif (
            activation
            and func is F.scaled_dot_product_attention
            and self._runs_math_kernel(attention_call(*args, **kwargs), outputs[0])
        ):
            self._record_attention(module, math_kernel_steps(args, kwargs))
        elif activation:
            kind = kind_of_function(getattr(func, "__name__", ""), outputs[0].ndim)
            if kind == LOSS:
                self._losses += 1
                kind = "other" if used & self._unclaimed.keys() else NOT_A_LAYER
            if kind is not None and not (outputs[0].is_floating_point() or outputs[0].is_complex()):
                kind = (
                    NOT_A_LAYER  # labels that are shifted, positions that are added: no activations
                )
            if kind is None:
                allocates = (
                    outputs[0].ndim > 0
                    and outputs[0].is_floating_point()
                    and not _aliases(inputs, outputs)
                )
                kind = "other" if allocates else NOT_A_LAYER
            if kind in _DROPOUTS and _drops_nothing(*args, **kwargs):
                kind = NOT_A_LAYER
            if kind != NOT_A_LAYER:
                joins = sum(m.activation for m in marks) > 1
                if len(inputs) == 1 and not used:
                    kind = kind_with_number(
                        kind, bool(self._calls) and self._calls[-1].kind == "matmul"
                    )
                    if kind == "other" and _aliases(inputs, outputs):
                        kind = NOT_A_LAYER  # a sum or product with a number, in place
            if kind != NOT_A_LAYER:
                self._record(
                    self._refined(kind, used, inputs), module, outputs, used, inputs, joins
                )
        for tensor in outputs:
            self._marks[tensor] = mark

    def finish(self) -> Walk:
        """Return the walk; a parameter that no call has claimed goes to the first call of its
        module."""
        executed: dict[str, int] = {}
        for index in range(len(self._calls) - 1, -1, -1):
            parts = self._calls[index].path.split(".") if self._calls[index].path else []
            executed |= {".".join(parts[:depth]): index for depth in range(1, len(parts) + 1)}
        indirect: list[str] = []
        unused: list[str] = []
        for key, parameter in self._unclaimed.items():
            name = self._names[key]
            first_call = executed.get(name.rpartition(".")[0])
            if first_call is None:
                unused.append(name)
                continue
            indirect.append(name)
            call = self._calls[first_call]
            self._calls[first_call] = replace(
                call,
                parameters=call.parameters + parameter.numel(),
                trains=call.trains or key in self._trained,
            )
        kernel = max(self._kernels, key=self._kernels.__getitem__, default=None)
        return Walk(
            tuple(self._calls),
            tuple(indirect),
            tuple(unused),
            tuple(self._unseen),
            self._losses,
            self._checkpointed,
            kernel,
        )

    def _runs_math_kernel(self, call: AttentionCall | None, output: Tensor) -> bool:
        kernel = MATH if call is None else self._attention(call)
        self._kernels[kernel] += output.numel()
        return kernel == MATH

    def _mark(self, tensor: Tensor) -> _Mark:
        if tensor in self._marks:
            return self._marks[tensor]
        parameters = self._parameters_in(tensor)
        return _Mark(tensor.grad_fn is not None and not parameters, parameters)

    def _parameters_in(self, tensor: Tensor) -> frozenset[int]:
        """The parameters that share the tensor's memory, by ``id``."""
        return self._by_storage.get(storage_id(tensor), frozenset())

    def _record(
        self,
        kind: str,
        module: nn.Module,
        outputs: Sequence[Tensor],
        used: Iterable[int],
        inputs: Sequence[Tensor],
        joins_activations: bool = False,
    ) -> None:
        used = frozenset(used)
        numeric = [
            tensor for tensor in outputs if tensor.is_floating_point() or tensor.is_complex()
        ] or list(outputs)
        in_place = _aliases(inputs, outputs)
        part_of = kind if in_place and kept_in_place(kind) != kind else None
        length = None
        if kind in _ATTENTION:
            length = inputs[0].shape[-2]
        elif kind in _RECURRENT and inputs and inputs[0].ndim == 3:
            length = inputs[0].shape[1 if getattr(module, "batch_first", False) else 0]
        call = Call(
            kept_in_place(kind) if in_place else kind,
            tuple(numeric[0].shape) if numeric else (),
            sum(tensor.numel() for tensor in numeric),
            length,
            joins_activations,
            part_of,
        )
        self._append(call, used, module)
        if isinstance(module, nn.LSTM | nn.GRU) and kind in RESERVED_PER_UNIT:
            # The reserve space of cuDNN is a second layer of the kind: it keeps as much as this,
            # and has no parameters.
            steps = inputs[0].numel() // inputs[0].shape[-1]
            reserve = reserve_elements(
                kind,
                steps=steps,
                hidden=module.hidden_size,
                layers=module.num_layers,
                directions=2 if module.bidirectional else 1,
            )
            self._append(Call(kind, (reserve,), reserve, length), used, module)

    def _record_attention(self, module: nn.Module, steps: Iterable[AttentionStep]) -> None:
        for step in steps:
            used = frozenset[int]().union(
                *(self._mark(parameter).parameters for parameter in step.parameters)
            )
            size = math.prod(step.shape)
            self._append(Call(step.kind, step.shape, size, step.query_length), used, module)

    def _append(self, call: Call, used: frozenset[int], module: nn.Module) -> None:
        """Adds the call of what ``module`` runs now, which uses these parameters."""
        claimed = [self._unclaimed.pop(key) for key in used if key in self._unclaimed]
        block = self._block_count if self._block_depth else 0
        self._calls.append(
            replace(
                call,
                path=self._modules.path_of(module),
                parameters=sum(parameter.numel() for parameter in claimed),
                trains=not self._trained.isdisjoint(used),
                block=block if self._blocks else None,
            )
        )
        self._checkpointed = self._checkpointed or checkpoint_calls()

    def _refined(self, kind: str, used: frozenset[int], inputs: Sequence[Tensor]) -> str:
        if kind == "matmul" and used:
            return "linear"
        if kind == "add" and any("pos" in self._names[key].rpartition(".")[2] for key in used):
            return "positional_embedding"
        if kind == "attention" and inputs[0].shape[-2] != inputs[:2][-1].shape[-2]:
            return "cross_attention"
        return kind


class _FunctionWatch(TorchFunctionMode):
    """Passes every PyTorch function that the model's code calls to the recorder."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self._recorder.saw_function(func, args, kwargs or {}, output)
        return output


def _drops_nothing(
    input: Tensor, p: float = 0.5, training: bool = True, *_: object, **__: object
) -> bool:
    """Whether a dropout returns its input (``aten/src/ATen/native/Dropout.cpp``)."""
    return p == 0 or not training


def _aliases(inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> bool:
    """Whether an output shares memory with an input: a view, or an operator that ran in place."""
    storages = {storage_id(tensor) for tensor in inputs}
    return any(storage_id(tensor) in storages for tensor in outputs)
