"""Private names of PyTorch's dispatcher and of autograd: modes below autograd, operators and their
schemas, kernels of our own, and which node of the backward graph runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Self

import torch
import torch.autograd.graph
import torch.overrides
from torch import Tensor

from gpumemnet.torch_private.names import TorchName, check, declare

__all__ = [
    "DispatchMode",
    "OpOverload",
    "PRIVATE_OPERATORS",
    "aten",
    "below_autograd",
    "find_operator",
    "operator_name",
    "operator_packet",
    "overriding_kernels",
    "schema",
    "tree_leaves",
    "tree_map_only",
    "unscale_gradients",
    "without_function_modes",
]

DISPATCH_MODE: Final = declare(
    "torch.utils._python_dispatch:TorchDispatchMode", "see every operator below autograd"
)
TREE_LEAVES: Final = declare(
    "torch.utils._pytree:tree_leaves", "find the tensors among an operator's arguments"
)
TREE_MAP_ONLY: Final = declare(
    "torch.utils._pytree:tree_map_only", "put meta tensors in place of an operator's arguments"
)
DISPATCH_KEY: Final = declare("torch._C:DispatchKey", "reach the kernel behind one of our own")

if TYPE_CHECKING:
    from torch._C import DispatchKeySet
    from torch._ops import OpOverload
    from torch.utils._pytree import tree_leaves, tree_map_only

    class TorchDispatchMode:
        """PyTorch's class as a context manager with types, which PyTorch's own lacks."""

        def __enter__(self) -> Self: ...

        def __exit__(self, *error: object) -> None: ...
else:
    OpOverload = Any
    TorchDispatchMode = DISPATCH_MODE.value()
    tree_leaves = TREE_LEAVES.value()
    tree_map_only = TREE_MAP_ONLY.value()


class DispatchMode(TorchDispatchMode):
    """A mode whose ``__torch_dispatch__`` sees each operator below autograd while it is entered."""

    def __init__(self) -> None:
        super().__init__()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; to tell Dynamo so would import it, which takes a second


def schema(operator: Any) -> Any:
    """The schema of an ``OpOverload``: its name, arguments and returns."""
    return operator._schema


def operator_name(operator: Any) -> str:
    """The name of an ``OpOverload`` without namespace and overload, such as ``add_``."""
    return str(operator._opname)


def operator_packet(operator: Any) -> Any:
    """The ``OpOverloadPacket`` that has an ``OpOverload``, such as ``aten.add`` for
    ``aten.add.Tensor``."""
    return operator._overloadpacket


def without_function_modes() -> AbstractContextManager[object]:
    """Context in which no ``TorchFunctionMode`` sees what is called."""
    return torch._C.DisableTorchFunction()


def below_autograd() -> AbstractContextManager[object]:
    """Context in which operators record nothing for the backward pass."""
    return torch._C._AutoDispatchBelowAutograd()


@contextmanager
def overriding_kernels(kernels: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Context in which operators run other kernels on meta tensors, ahead of autograd.

    Args:
        kernels: by ``OpOverload``; called as ``kernel(original, *args, **kwargs)``, where
            ``original`` is the operator's own.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for operator, kernel in kernels.items():
            library.impl(
                operator, _with_original(operator, kernel), "AutogradMeta", with_keyset=True
            )
        yield
    finally:
        library._destroy()


def _with_original(operator: Any, kernel: Callable[..., Any]) -> Callable[..., Any]:
    key: Any = DISPATCH_KEY.value()

    def run(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # No device has this key, but PyTorch's autograd kernels are registered for it as for all
        # the others.
        other_keys = keys.remove(key.AutogradMeta).add(key.AutogradOther)
        return kernel(partial(operator.redispatch, other_keys), *args, **kwargs)

    return run


PRIVATE_OPERATORS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("_softmax", "_log_softmax", "_safe_softmax"),
        "cast inside the kernel, and copy what is not contiguous",
    ),
    **dict.fromkeys(
        ("_softmax_backward_data", "_log_softmax_backward_data"), "copy what is not contiguous"
    ),
    **dict.fromkeys(
        ("_fused_rms_norm", "_fused_rms_norm_backward"), "keep what the fused kernel keeps"
    ),
    **dict.fromkeys(
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_backward",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_efficient_attention_backward",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_cudnn_attention_backward",
        ),
        "run the attention kernel that PyTorch would choose",
    ),
    "_thnn_fused_lstm_cell": "run the fused kernel of an LSTM cell",
    "_foreach_norm": "know the scratch memory of norms",
    **dict.fromkeys(
        ("_index_put_impl_", "_unsafe_index_put"), "know the scratch memory of sorting indices"
    ),
    "_pack_padded_sequence": "pack sequences by their lengths",
    "_grouped_mm": "multiply groups of rows by matrices of their own",
    "_sparse_addmm": "know the scratch memory of sparse products",
    **dict.fromkeys(
        ("_addmm_activation", "_scaled_mm", "_int_mm"), "know which operators use cuBLAS"
    ),
}
"""Private operators → what they are needed to do."""


class _Aten:
    """``torch.ops.aten``, with an error that says what to do where PyTorch lacks an operator."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and name not in PRIVATE_OPERATORS:
            raise AttributeError(
                f"the private operator aten.{name} is not declared in PRIVATE_OPERATORS"
            )
        operator = TorchName(
            f"torch:ops.aten.{name}", PRIVATE_OPERATORS.get(name, "trace its CUDA kernel")
        ).value()
        self.__dict__[name] = operator
        return operator


aten: Final[Any] = _Aten()
"""The operators of PyTorch: ``aten.add.Tensor`` is ``torch.ops.aten.add.Tensor``."""


def find_operator(name: str) -> Any:
    """The overload of ``torch.ops.aten`` called ``name``, such as ``pow.Scalar``; ``None`` if
    PyTorch does not have it."""
    packet, _, overload = name.partition(".")
    operator = getattr(torch.ops.aten, packet, None)
    return None if operator is None else getattr(operator, overload or "default", None)


def unscale_gradients(
    gradients: list[torch.Tensor], found_infinite: torch.Tensor, inverse_scale: torch.Tensor
) -> None:
    """Divide gradients by the scale, in place, as ``GradScaler`` does."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_infinite, inverse_scale)


def _probe_mode() -> None:
    seen: list[str] = []

    class Mode(DispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(operator_name(func))
            return func(*args, **(kwargs or {}))

    weight = torch.empty(3, 3, device="meta", requires_grad=True)
    with Mode():
        torch.autograd.backward(torch.mm(weight, weight).sum())
    check(
        seen[:2] == ["mm", "sum"] and seen.count("mm") == 3,
        f"a mode sees {seen} of a forward and a backward pass",
    )


def _probe_schema() -> None:
    add = torch.ops.aten.add_.Tensor
    names = [argument.name for argument in schema(add).arguments]
    check(
        operator_name(add) == "add_" and schema(add).name == "aten::add_",
        f"aten.add_ is called {schema(add).name}",
    )
    check(names == ["self", "other", "alpha"], f"the arguments of aten.add_ are {names}")
    writes = schema(add).arguments[0].alias_info
    check(
        writes is not None and writes.is_write,
        "aten.add_ does not say that it writes into its first argument",
    )
    check(operator_packet(add) is torch.ops.aten.add_, "an operator does not name its packet")


def _probe_kernels() -> None:
    called: list[int] = []

    def kernel(original: Callable[..., Any], tensor: torch.Tensor) -> Any:
        called.append(len(tensor))
        return original(tensor)

    tensor = torch.empty(5, device="meta", requires_grad=True)
    with overriding_kernels({torch.ops.aten.digamma.default: kernel}):
        result = tensor.digamma()
        check(called == [5], "a kernel of our own is not called")
        check(
            result.grad_fn is not None,
            "autograd records nothing of the operator behind a kernel of our own",
        )
    tensor.digamma()
    check(called == [5], "a kernel of our own is called after its context")


def _probe_function_modes() -> None:
    seen: list[object] = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        with without_function_modes():
            torch.empty(1, device="meta")
        check(not seen, "a function mode sees what it should not see")
        torch.empty(1, device="meta")
    check(bool(seen), "a function mode sees nothing")


def _probe_below_autograd() -> None:
    tensor = torch.empty(2, device="meta", requires_grad=True)
    with below_autograd():
        result = torch.ops.aten.mul.Tensor(tensor, tensor)
    check(result.grad_fn is None, "autograd records what it should not record")


declare(
    "torch.utils._python_dispatch:TorchDispatchMode.__torch_dispatch__",
    "see every operator",
    probe=_probe_mode,
)
declare(
    "torch.utils._python_dispatch:TorchDispatchMode._should_skip_dynamo",
    "keep dispatch modes from importing Dynamo",
)
declare(
    "torch._ops:OpOverload.redispatch",
    "reach the kernel behind one of our own",
    probe=_probe_kernels,
)
declare("torch.library:Library._destroy", "take kernels of our own away again")
declare(
    "torch:ops.aten.add_.Tensor._schema",
    "know what an operator returns and writes into",
    probe=_probe_schema,
)
declare("torch:ops.aten.add_.Tensor._opname", "know an operator by its name")
declare(
    "torch._C:DisableTorchFunction",
    "hide the trace's own calls from function modes",
    probe=_probe_function_modes,
)
declare(
    "torch._C:_AutoDispatchBelowAutograd",
    "run a kernel without its backward formula",
    probe=_probe_below_autograd,
)
declare(
    "torch:_amp_foreach_non_finite_check_and_unscale_",
    "divide gradients by the scale as GradScaler does",
)
for _name, _purpose in PRIVATE_OPERATORS.items():
    declare(f"torch:ops.aten.{_name}", _purpose)


ENGINE: Final = declare(
    "torch.autograd.graph:_engine_run_backward",
    "see whether the backward engine itself adds gradients",
)
_NO_TASK: Final = -1


def next_node_number() -> int:
    """The sequence number that the next node of the backward graph gets; it grows with every node
    of this thread."""
    return int(torch._C._autograd._get_sequence_nr())


def running_node_number() -> int | None:
    """The sequence number of the backward node that runs in this thread; ``None`` if none runs."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def backward_runs() -> bool:
    """Whether this thread is in a backward pass, where code runs without the function modes that
    were entered before."""
    return torch._C._current_graph_task_id() != _NO_TASK


def called_by_engine(own_packages: frozenset[str]) -> bool:
    """Whether a backward pass that records no gradients runs, and no Python code called since it
    started.

    Args:
        own_packages: packages of the kernels that ask; their frames are not looked at.
    """
    if torch.is_grad_enabled() or not backward_runs():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__package__") in own_packages:
        frame = frame.f_back
    return frame is not None and frame.f_code is _engine_code()


def _engine_code() -> Any:
    return torch.autograd.graph._engine_run_backward.__code__


def _probe_nodes() -> None:
    found: list[tuple[int | None, bool]] = []

    class Mode(DispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found.append((running_node_number(), torch._C._current_graph_task_id() != _NO_TASK))
            return func(*args, **(kwargs or {}))

    leaf = torch.empty(2, device="meta", requires_grad=True)
    number = next_node_number()
    result = leaf.sin()
    check(next_node_number() > number, "sequence numbers do not grow with nodes")
    check(running_node_number() is None, "a node is said to run where none does")
    check(
        torch._C._current_graph_task_id() == _NO_TASK,
        "a backward pass is said to run where none does",
    )
    with Mode():
        torch.autograd.backward(result, torch.empty(2, device="meta"))
    check(
        (number, True) in found,
        f"the nodes of a backward pass are {found}, without the forward pass's {number}",
    )


def _probe_engine() -> None:
    called: list[bool] = []

    class Mode(DispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            frame: FrameType | None = sys._getframe(1)
            codes = set()
            while frame is not None:
                codes.add(frame.f_code)
                frame = frame.f_back
            called.append(_engine_code() in codes)
            return func(*args, **(kwargs or {}))

    leaf = torch.empty(2, device="meta", requires_grad=True)
    with Mode():
        torch.autograd.backward(leaf.sin().sum())
    check(
        not called[0] and called[-1],
        "the engine's function is not found below a backward pass alone",
    )


declare(
    "torch._C:_autograd._get_sequence_nr",
    "know which module made a node of the backward graph",
    probe=_probe_nodes,
)
declare("torch._C:_current_autograd_node", "know which node of the backward graph runs")
declare("torch._C:_current_graph_task_id", "see whether a backward pass runs", probe=_probe_engine)


def leaves_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves whose gradients a backward pass from ``outputs`` accumulates."""
    nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen, leaves = set(nodes), []
    while nodes:
        node = nodes.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            leaves.append(leaf)
        following = [
            later for later, _ in node.next_functions if later is not None and later not in seen
        ]
        seen.update(following)
        nodes += following
    return leaves
