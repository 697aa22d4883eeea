"""Private names of PyTorch: how one is declared, found and replaced for a while, and those of
tensors, modules, operators and autograd.

PyTorch promises nothing about these names.  One that is missing is an error which names it.  A
tested release is traced without a word, any other with a note.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache, partial, reduce, wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Self, TypeGuard
from unittest.mock import patch

import torch
import torch.autograd.graph
import torch.overrides
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gpumemnet.errors import UnsupportedTorchError
from gpumemnet.torch_private.engine import DeviceThread, backward_runs

Function = Callable[..., Any]
"""Any function."""
Arguments = tuple[Any, ...]
"""What a function is called with by position."""
Keywords = dict[str, Any]
"""The same by name."""


def owner_of(name: str) -> tuple[Any, str]:
    """The object that has a name of PyTorch, and the last part of the name.

    Args:
        name: ``module:attribute``, such as ``torch._C:_current_autograd_node``.

    Raises:
        UnsupportedTorchError: PyTorch does not have the owner.
    """
    module, _, attributes = name.partition(":")
    *parents, last = attributes.split(".")
    try:
        return reduce(getattr, parents, import_module(module)), last
    except (ImportError, AttributeError) as error:
        raise missing(name) from error


def value_of(name: str) -> Any:
    """What a name of PyTorch stands for.

    Raises:
        UnsupportedTorchError: PyTorch does not have it.
    """
    owner, last = owner_of(name)
    try:
        return getattr(owner, last)
    except AttributeError as error:
        raise missing(name) from error


def missing(name: str) -> UnsupportedTorchError:
    """The error for a name that the installed PyTorch does not have."""
    return UnsupportedTorchError(
        f"PyTorch {torch.__version__} cannot be traced with this version of gpumemnet: {name.replace(':', '.')} is missing: "
        f"install a tested PyTorch ({' or '.join(TESTED_RELEASES)}) or a newer gpumemnet"
    )


TESTED_RELEASES: Final = ("2.11", "2.13")
"""Releases of PyTorch that the tests have passed with."""


def torch_release() -> tuple[int, int]:
    """Major and minor version of the installed PyTorch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@contextmanager
def replaced(replacements: Iterable[tuple[str, object]]) -> Iterator[None]:
    """Context in which names stand for something else.

    Args:
        replacements: each name with what takes its place; a question mark follows a name that
            PyTorch lacks by design, and looks up all the same.

    Raises:
        UnsupportedTorchError: PyTorch does not have one of the names.
    """
    with ExitStack() as stack:
        for name, replacement in replacements:
            path = name.removesuffix("?")
            if path == name:
                value_of(name)
            owner, last = owner_of(path)
            if isinstance(replacement, FunctionType) and "<locals>" in replacement.__qualname__:
                # By its name it can be pickled, as a task for another process is.
                replacement.__module__, _, replacement.__qualname__ = path.partition(":")
                replacement.__name__ = last  # which numba looks up
                replacement.__doc__ = getattr(owner, last, replacement).__doc__
            stack.enter_context(patch.object(owner, last, replacement, create=path != name))
        yield


_DIRECTLY_USED: Final = (
    *("torch:UntypedStorage._cdata", "torch:Tensor._use_count", "torch._C:_storage_Use_Count"),
    *("torch:Tensor._version", "torch:Tensor._is_view", "torch._ops:OpOverload.redispatch"),
    *("torch.library:Library._destroy", "torch._C:DisableTorchFunction"),
    *("torch._C:_AutoDispatchBelowAutograd", "torch._C:_autograd._get_sequence_nr"),
    *("torch._C:_current_autograd_node", "torch._C:_current_graph_task_id"),
    *("torch:_amp_foreach_non_finite_check_and_unscale_", "torch._C:_get_sdp_priority_order"),
    *("torch.nn.modules.loss:_Loss", "torch.nn.modules.batchnorm:_BatchNorm"),
)
"""Names that are used as they are; the others are looked up, and missed, by :func:`value_of`."""


def check_torch() -> tuple[str, ...]:
    """Return a note for a release that was not tested; nothing for a tested one.

    Raises:
        UnsupportedTorchError: names what an untested release lacks, and what to do.
    """
    if ".".join(map(str, torch_release())) in TESTED_RELEASES:
        return ()
    for path in _DIRECTLY_USED:
        value_of(path)
    tested = " and ".join(TESTED_RELEASES)
    return (
        f"Traced with PyTorch {torch.__version__}, which this version of gpumemnet was not tested with (tested: {tested}).",
    )


@cache
def declare_torchvision_operators() -> object:
    """Declare the operators that ``import torchvision`` expects, once in a process.

    Its builds for CUDA do not load theirs beside a CPU build of PyTorch.

    Returns:
        what keeps them declared.
    """
    found = find_spec("torchvision")
    if torch.version.cuda is not None or found is None or found.origin is None:
        return None
    version = Path(found.origin).with_name("version.py")
    if not version.exists() or "+cu" not in version.read_text():
        return None  # it brings its own operators
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for operator in ("nms", "qnms"):
        with suppress(RuntimeError):  # somebody else has declared it
            library.define(f"{operator}(Tensor a, Tensor b, float c) -> Tensor")  # type: ignore[no-untyped-call]
    return library


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The storage of a tensor, of a sparse one that of its first part."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # it has none of its own
        if is_sparse(tensor):
            return storage_of(dense_parts(tensor)[0])
        # One of the tensors that torch.vmap computes with.
        return storage_of(torch._C._functorch.get_unwrapped(tensor))


def storage_id(tensor: Tensor) -> int:
    """A number that views of one tensor share, and that no other living storage has."""
    return id_of_storage(storage_of(tensor))


def id_of_storage(storage: torch.UntypedStorage) -> int:
    """As :func:`storage_id`, of the storage itself."""
    return int(storage._cdata)


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that have the storages of ``tensor``: itself, or the indices and values of a
    sparse one."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def is_sparse(tensor: Tensor) -> bool:
    """Whether ``tensor`` has one of the layouts that are traced: COO, CSR or CSC."""
    return tensor.layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


def reference_counts(tensor: Tensor) -> tuple[int, int]:
    """How many owners in C++ a tensor and its storage have; the storage object that this call makes
    counts as one."""
    return tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


def storage_owners(number: int) -> int:
    """How many owners in C++ the storage with this :func:`storage_id` has; it must be alive."""
    return int(torch._C._storage_Use_Count(number))


def is_view(tensor: Tensor) -> bool:
    """Whether autograd knows ``tensor`` as a view of another."""
    return bool(tensor._is_view())


def is_part(tensor: Tensor) -> bool:
    """Whether the storage of ``tensor`` holds more than it."""
    return tensor.untyped_storage().nbytes() > tensor.nbytes


def viewed(tensor: Tensor) -> Tensor:
    """The tensor that ``tensor`` is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def part_on_rank(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that this rank holds: all of it, unless it is sharded (a
    ``DTensor``)."""
    return getattr(tensor, "_local_tensor", tensor)


STORAGE_RESIZE: Final = "torch:UntypedStorage.resize_"
"""To notice that fully_shard gives up gathered parameters."""


OWN_DICTS: Final = frozenset(
    name for name, value in vars(nn.Module()).items() if isinstance(value, dict)
)
"""Attributes of every module that are dicts: its parameters, its children, its hooks."""


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


_SET_GRADIENTS: Final[Function] = torch._C._set_grad_enabled

if TYPE_CHECKING:
    from torch._C import DispatchKeySet
    from torch._ops import OpOverload as OpOverload
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map_only as tree_map_only

    class TorchDispatchMode:
        """PyTorch's class as a context manager with types, which PyTorch's own lacks."""

        def __enter__(self) -> Self: ...

        def __exit__(self, *error: object) -> None: ...
else:
    OpOverload = Any
    TorchDispatchMode = value_of("torch.utils._python_dispatch:TorchDispatchMode")
    tree_leaves = value_of("torch.utils._pytree:tree_leaves")
    tree_map_only = value_of("torch.utils._pytree:tree_map_only")


class DispatchMode(TorchDispatchMode):
    """A mode whose ``__torch_dispatch__`` sees each operator below autograd while it is entered."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self.run(func, args, dict(kwargs or {}))

    def run(self, func: Any, args: Arguments, kwargs: Keywords) -> Any:
        """Run an operator; each mode says how."""
        raise NotImplementedError

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; to tell Dynamo so would import it, which takes a second


def schema(operator: Any) -> Any:
    """The schema of an ``OpOverload``: its name, arguments and returns."""
    return operator._schema


def operator_name(operator: Any) -> str:
    """The name of an ``OpOverload`` without namespace and overload, such as ``add_``."""
    return str(operator._opname)


def python_function(operator: Any) -> Function | None:
    """The function of an operator that ``torch.library.custom_op`` has made; ``None`` for others."""
    made = value_of("torch._library.custom_ops:OPDEFS").get(schema(operator).name)
    return getattr(made, "_init_fn", None)


def least_sized(operator: Any) -> Function | None:
    """What says which output an operator of another library has, each size that depends on values
    as small as it can be; ``None`` if nothing says that."""
    operators = value_of("torch._library.simple_registry:singleton")
    kernel = operators.find(schema(operator).name).fake_impl.kernel
    least = SimpleNamespace(new_dynamic_size=lambda *, min=0, max=None: min)

    def run(*args: Any, **kwargs: Any) -> Any:
        with value_of("torch._library.fake_impl:set_ctx_getter")(lambda: least):
            return kernel(*args, **kwargs)

    return None if kernel is None else run


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written into; 0 for those that do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def without_function_modes() -> AbstractContextManager[object]:
    """Context in which no ``TorchFunctionMode`` sees what is called."""
    return torch._C.DisableTorchFunction()


def sees_functions() -> bool:
    """Whether a ``TorchFunctionMode`` sees what is called."""
    return torch._C._is_torch_function_enabled()


def below_autograd() -> AbstractContextManager[object]:
    """Context in which operators record nothing for the backward pass."""
    return torch._C._AutoDispatchBelowAutograd()


@contextmanager
def overriding_kernels(kernels: Mapping[Any, Function]) -> Iterator[None]:
    """Context in which operators run other kernels on meta tensors, ahead of autograd.

    PyTorch's inference mode leaves out what is ahead of autograd, which autocast on a GPU is not, so
    another one takes its place.

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
        with replaced([("torch:inference_mode.__enter__", _enter_inference_mode)]):
            yield
    finally:
        library._destroy()


class InferenceMode:
    """What :class:`torch.inference_mode` enters in place of PyTorch's: nothing turns gradients on
    within it."""

    is_on = False
    """Whether code runs in it."""

    def __init__(self, mode: bool) -> None:
        self._before, self._was_on = torch.is_grad_enabled(), InferenceMode.is_on
        InferenceMode.is_on = mode
        _set_gradients(not mode)
        set_within = (lambda mode: None) if mode else _SET_GRADIENTS
        self._patch = patch.object(torch._C, "_set_grad_enabled", set_within)
        self._patch.start()

    def __exit__(self, *args: object) -> None:
        self._patch.stop()
        InferenceMode.is_on = self._was_on
        _set_gradients(self._before)


def _set_gradients(mode: bool) -> None:
    with without_function_modes():  # which would look the function up by its name
        _SET_GRADIENTS(mode)


def _enter_inference_mode(context: Any) -> None:
    context._inference_mode_context = InferenceMode(context.mode)


def _with_original(operator: Any, kernel: Function) -> Function:
    key: Any = value_of("torch._C:DispatchKey")

    def run(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        # No device has this key, but PyTorch's autograd kernels are registered for it as for all
        # the others.
        other_keys = keys.remove(key.AutogradMeta).add(key.AutogradOther)
        # While Dynamo and AOTAutograd trace, this key would choose our own kernel again.
        other_keys = other_keys.remove(key.PythonDispatcher)
        return kernel(partial(operator.redispatch, other_keys), *args, **kwargs)

    return run


class _Aten:
    """``torch.ops.aten``, with an error that says what to do where PyTorch lacks an operator."""

    def __getattr__(self, name: str) -> Any:
        operator = value_of(f"torch:ops.aten.{name}")
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


ENGINE: Final = "torch.autograd:_engine_run_backward"
"""To see whether the backward engine itself adds gradients."""
FUNCTION_MODES: Final = "torch.overrides:_get_current_function_mode_stack"
"""To know the modes of a thread."""
_SAVED_TENSORS_HOOKS: Final = "torch.autograd.graph:saved_tensors_hooks.__init__"
"""To let hooks and recomputed blocks see a GPU."""


@contextmanager
def seen_within_operators(mode: TorchFunctionMode) -> Iterator[None]:
    """Context in which ``mode`` also sees the Python code that PyTorch runs within an operator: the
    backward pass of custom functions, hooks of saved tensors, and blocks that are recomputed.

    PyTorch leaves a mode while the mode handles a function, and ``backward`` is such a function.
    """
    stack = value_of(FUNCTION_MODES)

    def seen(function: Function) -> Function:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if mode in stack():
                return function(*args, **kwargs)
            with mode:
                return function(*args, **kwargs)

        return run

    make = value_of(_SAVED_TENSORS_HOOKS)

    def made(hooks: Any, pack: Function, unpack: Function) -> None:
        make(hooks, seen(pack), seen(unpack))

    with replaced(
        [
            (_SAVED_TENSORS_HOOKS, made),
            (ENGINE, DeviceThread().numbered(seen(value_of(ENGINE)))),
        ]
    ):
        yield


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
    engine = torch.autograd.graph._engine_run_backward.__code__
    return frame is not None and frame.f_code is engine


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
