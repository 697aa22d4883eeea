"""What ``torch.cuda`` and ``torch.accelerator`` say of the simulated GPU, and its streams.

Streams only tell the recorder on which stream memory is allocated.  The caching allocator keeps a
pool for each stream.  Memory that ``fully_shard`` or a script's prefetching allocates on another
stream is not reused by the rest of the step.
"""

from __future__ import annotations

import os
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial, wraps
from itertools import count
from types import SimpleNamespace, TracebackType
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor, nn

from gpumemnet.extract.attention import cudnn_version
from gpumemnet.gpu import DeviceProfile, available_mib, context
from gpumemnet.launchers.launch_line import visible_gpus
from gpumemnet.launchers.libraries import cuda_replacements
from gpumemnet.torch_private import script as names
from gpumemnet.torch_private.names import value_of
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.units import MIB


class Event(names.Anything):
    """An event that has happened; to record it, and to wait for it, does nothing."""

    def query(self) -> bool:
        """Whether the event has happened: always."""
        return True

    def elapsed_time(self, end: object) -> float:
        """A millisecond passes: scripts divide by it."""
        return 1.0


class NumberedStream(names.Anything):
    """A stream; 0 is the default one.  To wait for it does nothing.

    Args:
        number: of the stream.
        streams: set to this stream while it is entered.
    """

    priority = 0
    device = torch.device("cuda", 0)

    def __init__(self, number: int, streams: Streams) -> None:
        self.number: Final = number
        self._streams = streams
        self._before: list[NumberedStream] = []

    @property
    def cuda_stream(self) -> int:
        """A number in place of the driver's handle."""
        return self.number

    stream_id = cuda_stream

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority."""
        return 0, -5

    def __enter__(self) -> NumberedStream:
        self._before.append(self._streams.current_stream())
        self._streams.set_stream(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._streams.set_stream(self._before.pop())

    def record_event(self, event: Event | None = None) -> Event:
        """An event that has happened."""
        return event or Event()

    def query(self) -> bool:
        """Whether the stream is idle: always."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is captured: never."""
        return False


class Streams:
    """The stream functions of a device's module, such as ``torch.cuda``.

    Args:
        chosen: called with the number of the stream on which memory is allocated from now on.
    """

    Event = Event

    def __init__(self, chosen: Callable[[int], None]) -> None:
        self._chosen = chosen
        self._default = self._current = NumberedStream(0, self)
        streams, numbers = self, count(1)

        class Stream(NumberedStream):
            """A new stream."""

            def __init__(self, *args: object, **kwargs: object) -> None:
                super().__init__(next(numbers), streams)

        self.Stream = Stream

    def current_stream(self, device: object = None) -> NumberedStream:
        """Return the current stream."""
        return self._current

    def default_stream(self, device: object = None) -> NumberedStream:
        """Return the default stream."""
        return self._default

    def stream(self, stream: NumberedStream | None) -> NumberedStream:
        """Return a context in which memory is allocated on ``stream``."""
        return stream or self._current

    def set_stream(self, stream: NumberedStream) -> None:
        """Allocate on ``stream`` from here on."""
        self._current = stream
        self._chosen(stream.number)


GPU: Final = torch.device("cuda", 0)
_WITHOUT_EFFECT: Final = (
    *("synchronize", "set_device", "init", "manual_seed", "manual_seed_all"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
    *("reset_accumulated_memory_stats", "seed", "seed_all", "set_rng_state", "set_rng_state_all"),
    "memory._dump_snapshot",
    *("nvtx.range_push", "nvtx.range_pop", "nvtx.mark", "nvtx.range_start", "nvtx.range_end"),
    *("profiler.start", "profiler.stop", "check_error"),
)
_AMOUNTS: Final = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("memory_cached", "max_memory_cached", "device_memory_used"),
)
_STREAMS: Final = ("Stream", "Event", "stream", "set_stream", "current_stream", "default_stream")
_ACCELERATOR_FROM_CUDA: Final = {
    **dict.fromkeys(("current_device_index", "current_device_idx"), "current_device"),
    **dict.fromkeys(("set_device_index", "set_device_idx"), "set_device"),
    "device_index": "device",
    "get_memory_info": "mem_get_info",
}
"""Function of ``torch.accelerator`` → the function of ``torch.cuda`` of another name that answers."""
_OTHER_PROPERTIES: Final = {
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "regs_per_multiprocessor": 65536,
    "warp_size": 32,
    "shared_memory_per_block": 48 << 10,
    "shared_memory_per_block_optin": 99 << 10,
    "L2_cache_size": 40 << 20,
    "shared_memory_per_multiprocessor": 100 << 10,
    **dict.fromkeys(("pci_bus_id", "pci_device_id", "pci_domain_id"), 0),
    **dict.fromkeys(("is_integrated", "is_multi_gpu_board"), 0),
    "uuid": "GPU-0",
    "gcnArchName": "",
}
"""Properties that hardly differ between GPUs."""
_RUNTIME: Final = (
    "cudaProfilerStart",
    "cudaProfilerStop",
    "cudaHostRegister",
    "cudaHostUnregister",
)
_MOST_GPUS: Final = 64
"""Of a host, in scripts."""
_RANDOM_STATE_BYTES: Final = 16


def card_bytes(device: DeviceProfile) -> tuple[int, int]:
    """Return the bytes of a GPU without what the driver reserves, and of a CUDA context on it."""
    return available_mib(device) * MIB, context(device).expected_bytes


def cuda_functions(
    platform: Platform,
    streams: Streams,
    live_bytes: Callable[[], int],
    emptied: Callable[[], None],
    count: int,
) -> list[tuple[str, object]]:
    """Return names of ``torch.cuda`` and ``torch.accelerator`` with what takes their place.

    The GPU's total memory is the capacity without what the driver reserves, as the driver reports
    it: 39.50 GiB on an A100 of 40 GB (see ``gpu/mig.json`` for each source).  The CUDA context and
    the script's tensors are not free.

    Args:
        platform: the simulated GPU.
        streams: its streams.
        live_bytes: returns the bytes that are allocated now.
        emptied: called when the script empties the cache.
        count: number of GPUs.
    """
    device = platform.device
    major, minor = device.compute_capability
    total_bytes, context_bytes = card_bytes(device)

    def properties(*args: object, **kwargs: object) -> SimpleNamespace:
        return SimpleNamespace(
            name=device.name,
            major=major,
            minor=minor,
            total_memory=total_bytes,
            multi_processor_count=device.multiprocessors,
            **_OTHER_PROPERTIES,
        )

    def statistics(*args: object, **kwargs: object) -> Counter[str]:
        amounts = ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes")
        moments = ("current", "peak", "allocated")
        return Counter({f"{a}.all.{m}": live_bytes() for a in amounts for m in moments})

    def always(value: object) -> Callable[..., object]:
        return lambda *args, **kwargs: (
            value
        )  # one function for each name: Dynamo's tables, once loaded, are keyed by identity

    def another(function: Callable[..., object]) -> Callable[..., object]:
        return lambda *args, **kwargs: function(*args, **kwargs)

    def overrides(values: Iterable[object]) -> bool:
        """Whether a class overrides functions of PyTorch, as a script may ask; modes do not count."""
        known = (Tensor, nn.Parameter)
        return any(
            hasattr(each, "__torch_function__") and type(each) not in known for each in values
        )

    def counted(*args: object) -> int:
        return max(count, visible_gpus(os.environ) or 0)  # which the script may set

    def random_state(*args: object, **kwargs: object) -> Tensor:
        return torch.zeros(_RANDOM_STATE_BYTES, dtype=torch.uint8)

    kernel: Any = another(lambda *inputs, **launch: None)  # writes what nothing computes
    kernel.set_shared_memory_config = always(None)
    constants = {
        "is_available": True,
        "is_initialized": True,
        "current_device": 0,
        "get_device_name": device.name,
        "get_device_capability": (major, minor),
        "is_current_stream_capturing": False,
        "is_bf16_supported": True,  # where the hardware lacks it, PyTorch emulates it
        "is_tf32_supported": major >= 8,
        "get_allocator_backend": "native",
        "get_arch_list": [f"sm_{major}{minor}"],
        "can_device_access_peer": True,
        "initial_seed": 0,
        "list_gpu_processes": "no processes are known",
        **dict.fromkeys(("utilization", "temperature", "power_draw", "clock_rate"), 0),
        "memory_usage": 0,
        "get_per_process_memory_fraction": 1.0,
        "memory_snapshot": [],
        "memory._snapshot": {"segments": [], "device_traces": []},
        "cudart": SimpleNamespace(**dict.fromkeys(_RUNTIME, lambda *args: 0)),
    }
    functions: dict[str, Any] = {name: always(value) for name, value in constants.items()}
    functions["device_count"] = counted
    functions |= {name: always(None) for name in _WITHOUT_EFFECT}
    functions |= {name: lambda *args, **kwargs: live_bytes() for name in _AMOUNTS}
    functions |= {
        "get_device_properties": properties,
        "mem_get_info": lambda *args, **kwargs: (
            max(0, total_bytes - context_bytes - live_bytes()),
            total_bytes,
        ),
        "empty_cache": lambda: emptied(),
        "memory_stats": statistics,
        "memory_summary": lambda *args, **kwargs: (
            f"{live_bytes():,} bytes are allocated on the simulated GPU"
        ),
        "get_rng_state": random_state,
        "get_rng_state_all": lambda: [random_state() for _ in range(counted())],
        "device": _SameDevice,
        "device_of": _SameDevice,
        "_compile_kernel": lambda *source, **options: kernel,
        "_DeviceGuard": _SameDevice,
        **dict.fromkeys(
            ("CUDAGraph", "graphs.CUDAGraph", "MemPool", "memory.MemPool"), names.Anything
        ),
        **dict.fromkeys(("use_mem_pool", "memory.use_mem_pool"), _SameDevice),
        "graph_pool_handle": always((0, 1)),
    }
    functions |= {name: getattr(streams, name) for name in _STREAMS}
    named = {f"torch.cuda:{name}": function for name, function in functions.items()}
    alike = {name: name for name in functions if hasattr(torch.accelerator, name)}
    alike.pop("get_device_capability", None)  # which means something else there
    named |= {
        f"torch.accelerator:{name}": another(functions[cuda_name])
        for name, cuda_name in (alike | _ACCELERATOR_FROM_CUDA).items()
    }
    for path, function in list(named.items()):  # torch.cuda.random.get_rng_state is another name
        module, name = path.split(":")
        home = getattr(value_of(path) if "." not in name else None, "__module__", "")
        if home.startswith(f"{module}.") and not isinstance(function, type):
            named[f"{home}:{name}"] = another(function)
    named["torch.cuda.nccl:version"] = always(
        (2, 27, 5)
    )  # errors of collectives are logged with it
    generators = tuple(torch.Generator() for _ in range(_MOST_GPUS))
    plans = defaultdict[int, SimpleNamespace](partial(SimpleNamespace, max_size=4096, size=0))
    named |= {
        "torch.version:cuda": "13.0",  # code compares its parts
        "torch.backends.cuda:is_built": always(True),
        "torch.backends.cuda:preferred_linalg_library": always(None),
        "torch.autograd.profiler:emit_nvtx": another(lambda *args, **kwargs: nullcontext()),
        "torch.backends.cuda:cufft_plan_cache": plans,
        "torch.compiler:cudagraph_mark_step_begin": always(None),
        "torch.backends.cudnn:is_available": always(True),
        "torch.backends.cudnn:version": always(cudnn_version()),
        "torch.distributed:is_nccl_available": always(True),
        "torch.cuda:default_generators": generators,
    }
    named["torch.accelerator:current_accelerator"] = lambda check_available=False: torch.device(
        "cuda"
    )
    return [
        *named.items(),
        (names.DEVICE_COUNT, counted),
        *cuda_replacements(streams),
        (names.OVERRIDES, overrides),
        (names.OF_CUDA_BUILDS, names.of_cuda_builds),
    ]


class _SameDevice(nullcontext[None]):
    """Replaces ``torch.cuda.device``: the script runs on the first GPU throughout."""


class _CudaTensorType(type):
    """The class of ``torch.cuda.FloatTensor`` and its like: tensors on the GPU of that type are its
    instances."""

    dtype: torch.dtype

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, Tensor) and value.dtype == cls.dtype and value.is_cuda

    def __call__(cls, *args: Any, device: object = None, **named: Any) -> Tensor:
        args = args or (*named.values(),)
        if len(args) == 1 and not isinstance(args[0], int | torch.Size):
            return torch.as_tensor(args[0], dtype=cls.dtype).to(GPU)
        shape = args[0] if args and isinstance(args[0], torch.Size) else args or (0,)
        return torch.empty(shape, dtype=cls.dtype, device=GPU)


class _CudaSparseTensorType(_CudaTensorType):
    """The class of ``torch.cuda.sparse.FloatTensor`` and its like."""

    def __instancecheck__(cls, value: object) -> bool:
        return super().__instancecheck__(value) and value.layout is torch.sparse_coo  # type: ignore[attr-defined]

    def __call__(cls, *args: Any, device: object = None, **named: Any) -> Tensor:
        return torch.sparse_coo_tensor(*args, **named, dtype=cls.dtype, device=GPU)


def cuda_tensor_types() -> list[tuple[str, object]]:
    """Return ``torch.cuda.FloatTensor`` and the like with what takes their place."""
    kinds = [("torch.cuda", _CudaTensorType), ("torch.cuda.sparse", _CudaSparseTensorType)]
    return [
        (f"{module}:{name}", kind(name, (), {"dtype": dtype, "__module__": module}))
        for module, kind in kinds
        for name, dtype in names.TENSOR_TYPES.items()
        if kind is _CudaTensorType or hasattr(torch.cuda.sparse, name)
    ]


def tensor_new(make: Callable[..., Tensor], placed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return what replaces ``Tensor.__new__``, which cannot make a subclass from a tensor within
    modes.

    Args:
        make: ``Tensor.__new__``.
        placed: makes a plain tensor with ``make``, where the default type of tensors is.
    """

    @wraps(make)  # Dynamo compares signatures, and this one has none
    def new(kind: type[Tensor], *args: Any, **named: Any) -> Tensor:
        if kind is not Tensor and len(args) == 1 and isinstance(args[0], Tensor):
            return args[0].as_subclass(kind)
        return placed(make, *args, **named) if kind is Tensor else make(kind, *args, **named)

    return new


def swap_for_meta(tensor: Tensor, fresh: Tensor) -> None:
    """Turn ``tensor`` into the meta tensor ``fresh``; references to it stay valid."""
    if tensor.is_meta:
        tensor.data = fresh
        return
    kind = type(tensor)
    put = nn.Parameter(fresh, tensor.requires_grad) if kind is nn.Parameter else fresh
    if type(put) is Tensor and kind is not Tensor:
        put = names.of_class(put, kind, tensor.requires_grad)
    vars(put).update(vars(tensor))
    # Weak references, which PyTorch forbids, stay valid.
    with patch.object(weakref, "getweakrefs", lambda referred: []):
        torch.utils.swap_tensors(tensor, put)  # type: ignore[no-untyped-call]
