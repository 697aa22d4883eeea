"""DNNMem (Gao et al., ESEC/FSE 2020): tensors of a computation graph with their lifetimes, replayed
on the framework's allocator.

A forward pass on meta tensors gives the graph: its operators, in order, with the tensors that each
reads and makes.  A cost function for each operator says what its backward pass needs.  The schedule
is the forward order, then its reverse; reference counts give each tensor's end.  The allocator is
PyTorch's.

Only the first page of the paper is public; the rest follows how xMem's authors re-implemented it.
Assumptions:

* ReLU runs in place, weight gradients live to the end, and there is no optimizer state.
* Workspaces, which the paper reads from cuDNN on the GPU, are 0.
* The framework keeps 64 MiB for itself, as LLMem's paper reports of DNNMem.
* The context is that of the GPU's profile.

:data:`DNNMEM_OF_MODULES` is the same with a coarser graph, in which each call of a module without
children is one operator, as ``torch.fx`` shows it.  What a module makes and keeps inside is not in
the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpumemnet.allocator import replay
from gpumemnet.extract.module_calls import with_meta_tensors
from gpumemnet.extract.placement import placement
from gpumemnet.torch_private.names import DispatchMode, storage_id, tree_leaves
from gpumemnet.torch_private.training import without_dynamo
from gpumemnet.tracing.losses_and_optimizers import loss_function
from gpumemnet.tracing.missing_values import GuessedValues
from gpumemnet.units import MIB

from .estimator import PublishedEstimator, Subject

FRAMEWORK_BYTES: Final = 64 * MIB

KEEPS_INPUTS: Final = frozenset(
    {
        *(
            "convolution",
            "addmm",
            "mm",
            "bmm",
            "baddbmm",
            "mul",
            "div",
            "pow",
            "embedding",
            "index",
            "gather",
        ),
        *(
            "native_batch_norm",
            "cudnn_batch_norm",
            "native_layer_norm",
            "native_group_norm",
            "gelu",
            "silu",
            "mish",
            "hardswish",
        ),
        *(
            "hardsigmoid",
            "hardtanh",
            "leaky_relu",
            "elu",
            "softplus",
            "log_sigmoid_forward",
            "max_pool2d_with_indices",
        ),
        *(
            "avg_pool2d",
            "nll_loss_forward",
            "nll_loss2d_forward",
            "binary_cross_entropy_with_logits",
            "mse_loss",
            "abs",
            "log",
        ),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
        *(
            "_scaled_dot_product_fused_attention_overrideable",
            "_scaled_dot_product_flash_attention_for_cpu",
            "var",
            "var_mean",
        ),
    }
)
"""Operators whose backward pass reads what they read."""
KEEPS_OUTPUTS: Final = frozenset(
    {
        *(
            "_softmax",
            "_log_softmax",
            "tanh",
            "sigmoid",
            "exp",
            "sqrt",
            "rsqrt",
            "relu",
            "native_batch_norm",
            "cudnn_batch_norm",
        ),
        *(
            "native_layer_norm",
            "native_group_norm",
            "native_dropout",
            "max_pool2d_with_indices",
            "nll_loss_forward",
        ),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
        *(
            "_scaled_dot_product_fused_attention_overrideable",
            "_scaled_dot_product_flash_attention_for_cpu",
        ),
    }
)
"""Operators whose backward pass reads what they made: results, statistics, masks and indices."""
SECOND_OUTPUTS_ONLY: Final = frozenset(
    {
        "native_batch_norm",
        "cudnn_batch_norm",
        "native_layer_norm",
        "native_group_norm",
        "native_dropout",
        "max_pool2d_with_indices",
    }
)
"""Of the latter, those that keep everything but the result itself."""
IN_PLACE: Final = frozenset({"relu"})


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of the forward pass.

    Attributes:
        reads, makes: tensors, as indices into :attr:`Graph.sizes`.
        keeps: tensors that its backward pass needs.
        has_gradient: whether it has a backward pass.
    """

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    keeps: tuple[int, ...]
    has_gradient: bool


@dataclass(slots=True)
class Graph:
    """A forward pass.

    Attributes:
        sizes: bytes of every tensor.
        weights: parameters and buffers; trained: the parameters with a gradient.
        inputs: tensors of the batch.
        operators: in order.
    """

    sizes: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    trained: set[int] = field(default_factory=set)
    inputs: list[int] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)


class _GraphRecorder(DispatchMode):
    """Writes down every operator below autograd.

    Attributes:
        call: number of the call of a module without children that runs; ``None`` outside of such
            calls.
        calls: that of each operator.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph
        self.call: int | None = None
        self.calls: list[int | None] = []
        self._index: dict[int, int] = {}
        self._alive: list[
            torch.UntypedStorage
        ] = []  # a storage's number is used again once it is gone
        self._differentiable: set[int] = set()

    def known(self, tensor: Tensor) -> int:
        """Index of the storage of ``tensor``, which is added if it is new."""
        key = storage_id(tensor)
        if key not in self._index:
            self._index[key] = len(self._graph.sizes)
            self._graph.sizes.append(tensor.untyped_storage().nbytes())
            self._alive.append(tensor.untyped_storage())
        return self._index[key]

    def train(self, tensor: Tensor) -> None:
        """Take ``tensor`` for a trained parameter."""
        index = self.known(tensor)
        self._graph.trained.add(index)
        self._differentiable.add(index)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        read = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        reads = tuple(dict.fromkeys(map(self.known, read)))
        if name in IN_PLACE and read and made and self._is_activation(reads[0]):
            self._index[storage_id(made[0])] = reads[0]
            self._alive.append(made[0].untyped_storage())
        results = tuple(dict.fromkeys(map(self.known, made)))
        makes = tuple(index for index in results if index not in reads)
        has_gradient = any(index in self._differentiable for index in reads)
        if has_gradient:
            self._differentiable.update(
                index
                for tensor, index in zip(made, map(self.known, made), strict=True)
                if tensor.is_floating_point()
            )
        keeps: tuple[int, ...] = ()
        if has_gradient:
            keeps += reads if name in KEEPS_INPUTS else ()
            if name in KEEPS_OUTPUTS:
                keeps += results[1:] if name in SECOND_OUTPUTS_ONLY else results
        self._graph.operators.append(Operator(reads, makes, keeps, has_gradient))
        self.calls.append(self.call)
        return output

    def _is_activation(self, index: int) -> bool:
        return index not in self._graph.weights and index not in self._graph.inputs


def recorded_graph(subject: Subject, of_modules: bool = False) -> Graph:
    """The graph of one forward pass of a subject and of its loss.

    Args:
        subject: the job with its model.
        of_modules: whether each call of a module without children is one operator.
    """
    training, graph = subject.training(), Graph()
    recorder, model = _GraphRecorder(graph), training.network
    with torch.enable_grad(), placement(GuessedValues()), without_dynamo():
        model.train()
        with with_meta_tensors(model) as moved:
            for tensor, _, is_parameter in moved.moves:
                index = recorder.known(tensor)
                graph.weights.append(index)
                if is_parameter and tensor.requires_grad:
                    recorder.train(tensor)
            for tensor in training.inputs.tensors:
                graph.inputs.append(recorder.known(tensor))
            with recorder, _numbered_calls(model, recorder):
                output = _called(model, training)
                loss_function(training.options.loss)(
                    output, lambda shape, dtype: torch.empty(shape, dtype=dtype, device="meta")
                )
    if of_modules:
        graph.operators = _joined(graph, recorder.calls)
    return graph


@contextmanager
def _numbered_calls(model: nn.Module, recorder: _GraphRecorder) -> Iterator[None]:
    """Tell ``recorder`` which call of a module without children runs."""
    numbers = count()

    def enter(*_: object) -> None:
        recorder.call = next(numbers)

    def leave(*_: object) -> None:
        recorder.call = None

    leaves = [module for module in model.modules() if not any(module.children())]
    hooks = [module.register_forward_pre_hook(enter) for module in leaves]
    hooks += [module.register_forward_hook(leave) for module in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _joined(graph: Graph, calls: Sequence[int | None]) -> list[Operator]:
    """One operator for each call of a module: it makes its last result, and keeps what it reads of
    other operators' results."""
    known = {*graph.weights, *graph.inputs}
    joined: list[Operator] = []
    for call, pairs in groupby(zip(calls, graph.operators, strict=True), key=lambda pair: pair[0]):
        operators = [operator for _, operator in pairs]
        if call is not None:
            reads = tuple(
                dict.fromkeys(
                    tensor for operator in operators for tensor in operator.reads if tensor in known
                )
            )
            makes = next(
                (operator.makes[:1] for operator in reversed(operators) if operator.makes), ()
            )
            has_gradient = any(operator.has_gradient for operator in operators)
            operators = [Operator(reads, makes, reads if has_gradient else (), has_gradient)]
        known.update(tensor for operator in operators for tensor in operator.makes)
        joined += operators
    return joined


def _called(model: nn.Module, training: Any) -> Any:
    return model(*training.inputs.args, **training.inputs.kwargs)


def schedule(graph: Graph) -> tuple[list[int], list[int]]:
    """Allocations and frees of one iteration, and the bytes of each storage, as
    :func:`gpumemnet.allocator.replay` takes them.

    Weights come first and stay.  An output is freed after the last operator that reads it, forward
    or backward.  The gradient of a tensor is allocated by the first backward operator that computes
    it, and freed by that of the operator that made the tensor.
    """
    sizes, events = list(graph.sizes), []
    persistent = set(graph.weights) | set(graph.inputs)
    count = len(graph.operators)
    last_use: dict[int, int] = {}
    for at, operator in enumerate(graph.operators):
        last_use |= dict.fromkeys((*operator.reads, *operator.makes), at)
    for at, operator in enumerate(
        graph.operators
    ):  # backward operators run at 2 n - 1 - at; the earliest forward one is last
        for tensor in operator.keeps:
            last_use[tensor] = max(last_use.get(tensor, 0), 2 * count - 1 - at)
    freed_at: dict[int, list[int]] = {}
    for tensor, at in last_use.items():
        if tensor not in persistent:
            freed_at.setdefault(at, []).append(tensor)
    made_at = {
        tensor: at for at, operator in enumerate(graph.operators) for tensor in operator.makes
    }
    events += list(dict.fromkeys((*graph.weights, *graph.inputs)))
    alive = set(events)
    differentiable = set(graph.trained)
    for operator in graph.operators:
        if operator.has_gradient:
            differentiable.update(operator.makes)

    def free(at: int) -> None:
        for tensor in freed_at.get(at, ()):
            if tensor in alive:
                events.append(~tensor)
                alive.discard(tensor)

    for at, operator in enumerate(graph.operators):
        for tensor in operator.makes:
            events.append(tensor)
            alive.add(tensor)
        free(at)
    gradient: dict[int, int] = {}
    for at in range(count - 1, -1, -1):
        operator = graph.operators[at]
        if operator.has_gradient:
            for tensor in operator.reads:
                if tensor in differentiable and tensor not in gradient:
                    gradient[tensor] = len(sizes)
                    sizes.append(graph.sizes[tensor])
                    events.append(gradient[tensor])
            for tensor in operator.makes:
                if tensor in gradient and tensor not in graph.trained and made_at[tensor] == at:
                    events.append(~gradient[tensor])
        free(2 * count - 1 - at)
    return events, sizes


def parts(subject: Subject, of_modules: bool = False) -> Mapping[str, int]:
    """Reserved bytes of the replayed schedule, the framework's own, and the context; see
    :func:`recorded_graph`."""
    events, sizes = schedule(recorded_graph(subject, of_modules))
    reserved = replay(events, sizes).peak_reserved_bytes
    return {"reserved": reserved, "framework": FRAMEWORK_BYTES, "context": subject.context_bytes}


DNNMEM: Final = PublishedEstimator(
    name="DNNMem",
    needs="module",
    leaves_out="optimizer state and its temporaries, workspaces",
    source="Gao et al., ESEC/FSE 2020, after xMem's re-implementation",
    parts=parts,
)
DNNMEM_OF_MODULES: Final = PublishedEstimator(
    name="DNNMem, graph of modules",
    needs="module",
    leaves_out="the same, and what modules make and keep inside",
    source="the same, at the granularity of torch.fx",
    parts=lambda subject: parts(subject, of_modules=True),
)
