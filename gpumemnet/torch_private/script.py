"""Names that are replaced while a training script runs: what it sees of CUDA, and how modules get
to a GPU.  Public ones that are replaced in one place stand there.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

import torch

from gpumemnet.torch_private.names import FUNCTION_MODES, value_of, without_function_modes

TORCH_FOLDER: Final = f"{Path(torch.__file__).parent}/"
DEVICE_READERS: Final = (
    f"{TORCH_FOLDER}utils/tensorboard",
    f"{TORCH_FOLDER}nn/parallel/data_parallel.py",
    *(
        f"{TORCH_FOLDER}distributed/fsdp/{name}.py"
        for name in (
            *("_flat_param", "_init_utils", "_runtime_utils", "fully_sharded_data_parallel"),
            "sharded_grad_scaler",
        )
    ),
)
"""PyTorch's own code that sees the device of a tensor as the script does."""
SHARDING_FOLDER: Final = f"{TORCH_FOLDER}distributed/fsdp"
TRAINING_FILES: Final = frozenset(
    f"{TORCH_FOLDER}{name}.py"
    for name in ("nn/modules/module", "optim/optimizer", "autograd/__init__")
)
"""PyTorch's own code that runs modules, backward passes and optimizers."""
FETCHING_FILE: Final = f"{TORCH_FOLDER}utils/data/_utils/fetch.py"
"""That which asks a data set for samples."""
LAYERS_FOLDER: Final = str(Path(torch.nn.modules.__file__).parent)
WRAPPER_FILES: Final = frozenset({f"{TORCH_FOLDER}overrides.py", f"{TORCH_FOLDER}utils/_device.py"})
"""Files of PyTorch that stand between a caller and a function mode; the last is ``with
torch.device(…)``."""
METHOD_FILES: Final = tuple(
    f"{TORCH_FOLDER}{name}.py" for name in ("_tensor", "_ops", "functional", "_jit_internal")
)
"""Files of PyTorch with functions of tensors that are written in Python."""


OF_CUDA_BUILDS: Final = "torch._C:__getattr__?"
"""To answer for what PyTorch has only where it is built for GPUs."""
DEVICE_COUNT: Final = "torch._C:_cuda_getDeviceCount?"
"""To answer with more than an empty value."""
OVERRIDES: Final = "torch.overrides:has_torch_function"

TENSOR_TYPES: Final = {
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "DoubleTensor": torch.float64,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}
"""Name of a type of tensors in ``torch`` and ``torch.cuda`` → the type of its elements."""
MODULE_APPLY: Final = "torch.nn:Module._apply"
"""To put others in the place of a module's tensors."""
PARSE_TO: Final = "torch._C._nn:_parse_to"
"""To move tensors of other classes to the simulated GPU."""
LAZY_METHODS: Final = "torch.nn.parameter:UninitializedTensorMixin._allowed_methods"
"""To tell where parameters without a shape are."""
MODULE_CALL: Final = "torch.nn:Module.__call__"
"""To record passes that repeat."""
DECORATE: Final = "torch.utils._contextlib:_DecoratorContextManager.__call__"
"""To record again what functions without gradients allocate."""
JIT_GRAPH: Final = "torch.jit:_get_trace_graph"
"""To trace what is not compiled."""
JIT_EXECUTOR: Final = "torch._C:_jit_set_profiling_executor"
"""To keep the default one: the older one fuses operators, and knows no meta tensors."""
FAKE_TENSORS: Final = "torch._subclasses.fake_tensor:FakeTensorMode"
"""To write files with zeros that take no memory."""
WITHOUT_MODES: Final = "torch.utils._python_dispatch:_disable_current_modes"
"""To write files without recording it."""
ALLOCATOR_SETTINGS: Final = "torch._C:_accelerator_setAllocatorSettings"
"""To know the settings that a script chooses."""
ALL_TRUE: Final = "torch:_is_all_true"
"""To let distributions accept arguments that have no values."""


_ENTER_MODE: Final = {
    kind: (
        f"{module}:_push_mode",
        f"{module}:_pop_mode",
    )
    for kind, module in (
        ("function", "torch.overrides"),
        ("dispatch", "torch.utils._python_dispatch"),
    )
}
Modes = tuple[tuple[str, Any], ...]
"""Modes with their kind: ``function`` or ``dispatch``, outermost first."""


def modes_of_thread() -> Modes:
    """The modes that this thread has entered."""
    found = {
        "function": value_of(FUNCTION_MODES)(),
        "dispatch": value_of("torch.utils._python_dispatch:_get_current_dispatch_mode_stack")(),
    }
    return tuple((kind, mode) for kind, modes in found.items() for mode in modes)


@contextmanager
def with_modes(modes: Modes) -> Iterator[None]:
    """Context in which this thread has the modes of another."""
    with ExitStack() as stack:
        for kind, mode in modes:
            push, pop = _ENTER_MODE[kind]
            value_of(push)(mode)
            stack.callback(value_of(pop))
        yield


@contextmanager
def without_modes() -> Iterator[None]:
    """Context in which this thread has entered no modes."""
    with ExitStack() as stack:
        for kind, mode in reversed(modes_of_thread()):
            push, pop = _ENTER_MODE[kind]
            value_of(pop)()
            stack.callback(value_of(push), mode)
        yield


below_modes: Final = torch._C._DisableTorchDispatch
"""Context in which no mode sees operators."""


@contextmanager
def unseen() -> Iterator[None]:
    """Context in which no mode sees what is called: numbers are really computed."""
    with value_of(WITHOUT_MODES)(), without_function_modes():
        yield


SAFETENSORS_SAVE: Final = "safetensors.torch:save_file"
SAFETENSORS_TYPES: Final = "safetensors.torch:_TYPES"
"""Of another library, which may not be installed."""


def _do_nothing(*args: object, **kwargs: object) -> None:
    """Take the place of a method."""


class Anything:
    """An object that has all methods, and does nothing."""

    __init__ = _do_nothing

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _do_nothing


@cache
def _cuda_declarations() -> str:
    sections = Path(TORCH_FOLDER, "_C/__init__.pyi").read_text().split("# Defined in ")
    return "".join(each for each in sections if each.startswith("torch/csrc/cuda/"))


@cache
def of_cuda_builds(name: str) -> Any:
    """Return what ``torch._C`` has only where PyTorch is built for CUDA: libraries call functions
    such as ``_cuda_clearCublasWorkspaces``.  PyTorch's stub file declares them; each returns an empty
    value of its declared type.

    Raises:
        AttributeError: the stub file has no such name for CUDA.
    """
    declared = rf"^(class|def) {name}\b(?:\([^)]*\) -> (\w+))?"
    found = re.search(declared, _cuda_declarations(), re.MULTILINE)
    if found is None:
        raise AttributeError(f"module 'torch._C' has no attribute {name!r}")
    if found[1] == "class":
        return type(name, (Anything,), {})
    empty = getattr(builtins, str(found[2]).strip("_"), None) or _do_nothing  # such as "_int"
    return lambda *args, **kwargs: empty()


def device_constructors() -> frozenset[Any]:
    """The functions that allocate on the default device."""
    return frozenset(value_of("torch.utils._device:_device_constructors")())


def cpu_generator(shown_device: torch.device) -> type:
    """A class of generators that work on the host and say that they are on ``shown_device`` where
    that was asked for."""

    base: Any = torch._C.Generator

    class Generator(base):  # type: ignore[misc]
        shown: torch.device

        def __new__(cls, device: object = "cpu") -> Self:
            made: Self = super().__new__(cls, "cpu")
            made.shown = (
                shown_device
                if torch.device(str(device)).type == shown_device.type
                else torch.device("cpu")
            )
            return made

        @property
        def device(self) -> torch.device:
            return self.shown

    return Generator


def of_class(tensor: torch.Tensor, kind: type[torch.Tensor], needs_grad: bool) -> torch.Tensor:
    """``tensor`` as one of a subclass, such as bitsandbytes has; ``as_subclass`` would return a
    view, which keeps what it views."""
    return torch.Tensor._make_subclass(kind, tensor, needs_grad)
