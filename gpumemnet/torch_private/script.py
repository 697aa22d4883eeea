"""Names that are replaced while a training script runs: what it sees of CUDA, and how modules get
to a GPU.

Most of these names are public; they are listed here because the trace puts functions of its own in
their place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Final, Self

import torch

from gpumemnet.torch_private.names import SCRIPT, TorchName, check, declare, has_parameters

TORCH_FOLDER: Final = str(Path(torch.__file__).parent)
LAYERS_FOLDER: Final = str(Path(torch.nn.modules.__file__).parent)
LBFGS_FILE: Final = inspect.getfile(torch.optim.LBFGS)
WRAPPER_FILES: Final = frozenset(
    {f"{TORCH_FOLDER}/overrides.py", f"{TORCH_FOLDER}/utils/_device.py"}
)
"""Files of PyTorch that stand between a caller and a function mode; the last is ``with
torch.device(…)``."""

_declare = partial(declare, use=SCRIPT)

CUDA_CONSTANTS: Final = (
    "is_available",
    "is_initialized",
    "device_count",
    "current_device",
    "get_device_name",
    "get_device_capability",
    "is_current_stream_capturing",
    "is_bf16_supported",
    "is_tf32_supported",
    "get_allocator_backend",
    "get_arch_list",
    "can_device_access_peer",
    "initial_seed",
    "utilization",
    "memory_snapshot",
)
"""Functions of ``torch.cuda`` that answer the same throughout a trace."""
CUDA_WITHOUT_EFFECT: Final = (
    "synchronize",
    "set_device",
    "init",
    "manual_seed",
    "manual_seed_all",
    "ipc_collect",
    "reset_peak_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "reset_accumulated_memory_stats",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
    "memory._record_memory_history",
    "memory._dump_snapshot",
    "nvtx.range_push",
    "nvtx.range_pop",
    "nvtx.mark",
)
CUDA_AMOUNTS: Final = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_cached",
    "max_memory_cached",
    "device_memory_used",
)
CUDA_STREAMS: Final = (
    "Stream",
    "Event",
    "stream",
    "set_stream",
    "current_stream",
    "default_stream",
)
CUDA_MEMORY: Final = (
    "get_device_properties",
    "mem_get_info",
    "empty_cache",
    "memory_stats",
    "memory_summary",
    "get_rng_state",
    "get_rng_state_all",
    "device",
    "device_of",
)

CUDA: Final[dict[str, TorchName]] = {
    name: _declare(f"torch.cuda:{name}", "answer for the simulated GPU")
    for name in (*CUDA_CONSTANTS, *CUDA_WITHOUT_EFFECT, *CUDA_AMOUNTS, *CUDA_STREAMS, *CUDA_MEMORY)
}
"""Functions of ``torch.cuda`` by their name."""

ACCELERATOR_FROM_CUDA: Final[dict[str, str]] = {
    **dict.fromkeys(("current_device_index", "current_device_idx"), "current_device"),
    **dict.fromkeys(("set_device_index", "set_device_idx"), "set_device"),
    **{
        name: name
        for name in (
            "is_available",
            "device_count",
            "synchronize",
            "empty_cache",
            "memory_stats",
            "memory_allocated",
            "max_memory_allocated",
            "memory_reserved",
            "max_memory_reserved",
            "reset_peak_memory_stats",
            "reset_accumulated_memory_stats",
            "current_stream",
            "set_stream",
        )
    },
    "device_index": "device",
    "get_memory_info": "mem_get_info",
}
"""Function of ``torch.accelerator`` → the function of ``torch.cuda`` that answers in its place."""
ACCELERATOR: Final[dict[str, TorchName]] = {
    name: _declare(f"torch.accelerator:{name}", "answer for the simulated GPU")
    for name in (*ACCELERATOR_FROM_CUDA, "current_accelerator")
}
RAW_STREAM: Final = declare(
    "torch._C:_cuda_getCurrentRawStream",
    "give kernels the stream of the simulated GPU",
    use=SCRIPT,
    is_created=True,
)
"""PyTorch has it only where it is built for GPUs."""

TENSOR_TYPES: Final[dict[str, torch.dtype]] = {
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
CUDA_TENSOR_TYPES: Final[dict[str, TorchName]] = {
    name: _declare(f"torch.cuda:{name}", "allocate on the simulated GPU") for name in TENSOR_TYPES
}
GENERATOR: Final = _declare("torch:Generator", "accept generators of the simulated GPU")
LOAD: Final = _declare("torch:load", "load tensors to the simulated GPU")
DATA_PARALLEL: Final = _declare(
    "torch.nn:DataParallel.forward", "run the first GPU's share of a batch"
)
_CONSTRUCTORS: Final = _declare(
    "torch.utils._device:_device_constructors", "know which functions use the default device"
)
PIN_MEMORY: Final = _declare(
    "torch:Tensor.pin_memory", "leave tensors of data loaders where they are"
)
RECORD_STREAM: Final = _declare("torch:Tensor.record_stream", "accept streams of the simulated GPU")
MODULE_TO: Final = _declare("torch.nn:Module.to", "move modules to the simulated GPU")
MODULE_TO_EMPTY: Final = _declare(
    "torch.nn:Module.to_empty",
    "allocate modules on the simulated GPU",
    probe=has_parameters("torch.nn:Module.to_empty", "self", "device"),
)
MODULE_CUDA: Final = _declare("torch.nn:Module.cuda", "move modules to the simulated GPU")
COMPILE: Final = _declare("torch:compile", "trace what is not compiled")
SAVE: Final = _declare("torch:save", "write files with zeros for weights without values")
FAKE_TENSORS: Final = _declare(
    "torch._subclasses.fake_tensor:FakeTensorMode", "write files with zeros that take no memory"
)
WITHOUT_MODES: Final = _declare(
    "torch.utils._python_dispatch:_disable_current_modes", "write files without recording it"
)
SET_DEFAULT_DEVICE: Final = _declare(
    "torch:set_default_device", "allocate on the device that a script chooses for everything"
)
GET_DEFAULT_DEVICE: Final = _declare("torch:get_default_device", "say which device that is")
ALLOCATOR_SETTINGS: Final = _declare(
    "torch._C:_accelerator_setAllocatorSettings", "know the settings that a script chooses"
)
MEMORY_FRACTION: Final = _declare(
    "torch.cuda:set_per_process_memory_fraction", "know the share of the GPU that a script chooses"
)
BACKWARD: Final = _declare("torch.autograd:backward", "know when a backward pass begins")
GRADIENTS: Final = _declare("torch.autograd:grad", "know when a script computes gradients itself")
ALL_TRUE: Final = _declare(
    "torch:_is_all_true", "let distributions accept arguments that have no values"
)
OPTIMIZER: Final = _declare(
    "torch.optim:Optimizer.__init__", "know whether a script has an optimizer"
)

_declare(
    "torch.__future__:set_overwrite_module_params_on_conversion",
    "give parameters a new identity in Module.to_empty",
)
_declare("torch.utils:swap_tensors", "put a meta tensor in place of a tensor that others refer to")

_FOR_THREADS: Final = "give threads the modes of a trace"
_FUNCTION_MODES: Final = _declare(
    "torch.overrides:_get_current_function_mode_stack", _FOR_THREADS, probe=lambda: _probe_modes()
)
_DISPATCH_MODES: Final = _declare(
    "torch.utils._python_dispatch:_get_current_dispatch_mode_stack", _FOR_THREADS
)
_ENTER_MODE: Final = {
    kind: (
        _declare(f"{module}:_push_mode", _FOR_THREADS),
        _declare(f"{module}:_pop_mode", _FOR_THREADS),
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
    found = {"function": _FUNCTION_MODES.value()(), "dispatch": _DISPATCH_MODES.value()()}
    return tuple((kind, mode) for kind, modes in found.items() for mode in modes)


@contextmanager
def with_modes(modes: Modes) -> Iterator[None]:
    """Context in which this thread has the modes of another."""
    with ExitStack() as stack:
        for kind, mode in modes:
            push, pop = _ENTER_MODE[kind]
            push.value()(mode)
            stack.callback(pop.value())
        yield


def _probe_modes() -> None:
    from torch.overrides import TorchFunctionMode

    seen: list[object] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        modes = modes_of_thread()
    thread = Thread(target=lambda: _with_modes(modes, lambda: torch.empty(1, device="meta")))
    thread.start()
    thread.join()
    check(torch.empty in seen, "a mode of one thread is not seen in another")


def _with_modes(modes: Modes, call: Callable[[], object]) -> None:
    with with_modes(modes):
        call()


THREAD_START: Final = _declare("threading:Thread.start", _FOR_THREADS)
PROCESS_INIT: Final = _declare(
    "multiprocessing.process:BaseProcess.__init__",
    "know what a process is given",
    probe=has_parameters(
        "multiprocessing.process:BaseProcess.__init__",
        "self",
        "group",
        "target",
        "name",
        "args",
        "kwargs",
    ),
)
PROCESS_START: Final = _declare(
    "multiprocessing.process:BaseProcess.start", "run the first of several processes in this one"
)
PROCESS_JOIN: Final = _declare(
    "multiprocessing.process:BaseProcess.join", "run the first of several processes in this one"
)
SAFETENSORS_SAVE: Final = TorchName(
    "safetensors.torch:save_file", "write files with zeros for weights without values", SCRIPT
)
"""Of another library, which may not be installed."""
DATA_PTR: Final = _declare(
    "torch:UntypedStorage.data_ptr", "let scripts tell which tensors share memory"
)


OPEN_FILE: Final = tuple(
    _declare(f"{module}:open", "know which files a script writes") for module in ("builtins", "io")
)
MOVE_FILE: Final = tuple(
    _declare(f"os:{name}", "follow the files that a script writes")
    for name in ("rename", "replace")
)
COPY_FILE: Final = _declare("shutil:copyfile", "follow the files that a script writes")


def device_constructors() -> frozenset[Any]:
    """The functions that allocate on the default device."""
    return frozenset(_CONSTRUCTORS.value()())


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
