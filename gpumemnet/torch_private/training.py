"""Private and replaced names of how a training step computes: optimizers, mixed precision, the
order of attention kernels, process groups, and Dynamo, which a trace keeps from being imported.

Optimizers, checkpoints and reference kernels are wrapped in a function that imports
``torch._dynamo`` on its first call, which takes more than a second, only to exclude itself from
compilation (``torch/_compile.py``).  A placeholder module answers that call.  Any other access
loads the real module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn
from torch.optim import LBFGS

from gpumemnet.torch_private.names import (
    PARALLEL,
    SCRIPT,
    TorchName,
    check,
    declare,
    has_parameters,
    replaced,
)

_OPTIMIZER_MODULES: Final = ("torch.optim.optimizer", "torch.utils._foreach_utils")
_OPTIMIZER_FUNCTIONS: Final = (
    "_get_foreach_kernels_supported_devices",
    "_get_fused_kernels_supported_devices",
)


def _devices_probe(path: str) -> Callable[[], None]:
    def probe() -> None:
        devices = TorchName(path, "be probed").value()()
        check(
            isinstance(devices, list) and "cuda" in devices,
            f"it returns {devices!r}, not a list of devices with cuda",
        )

    return probe


_SUPPORTED: Final = tuple(
    declare(
        path,
        "let optimizers choose the implementation that they choose on a GPU",
        probe=_devices_probe(path),
    )
    for module in _OPTIMIZER_MODULES
    for function in _OPTIMIZER_FUNCTIONS
    for path in (f"{module}:{function}",)
)


def gpu_optimizers() -> AbstractContextManager[None]:
    """Context in which optimizers treat meta parameters as CUDA's: foreach by default, fused where
    asked for."""

    def with_meta(original: Callable[[], list[str]]) -> Callable[[], list[str]]:
        return lambda: [*original(), "cuda", "meta"]

    return replaced((name, with_meta(name.value())) for name in _SUPPORTED)


def fill_history(optimizer: LBFGS) -> None:
    """Give ``optimizer``, which has made a step, as many past updates as it keeps at most."""
    group = optimizer.param_groups[0]
    state = optimizer.state[group["params"][0]]
    missing = group["history_size"] - len(state["old_dirs"])
    state["old_dirs"] += [torch.empty_like(state["d"]) for _ in range(missing)]
    state["old_stps"] += [torch.empty_like(state["d"]) for _ in range(missing)]
    state["ro"] += [state["d"].new_empty(()) for _ in range(missing)]


def _probe_history() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = LBFGS([weight], lr=0.1, max_iter=3, max_eval=9, history_size=5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**4).sum()
        torch.autograd.backward(loss)
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    state = optimizer.state[weight]
    lengths = {name: len(state[name]) for name in ("old_dirs", "old_stps", "ro")}
    check(
        set(lengths.values()) == {2},
        f"after three iterations the history of LBFGS is {lengths}, not of two updates",
    )
    check(
        state["old_dirs"][0].shape == state["d"].shape,
        "the history of LBFGS has another shape than its direction",
    )


declare("torch.optim:LBFGS", "know the history that LBFGS keeps", use=SCRIPT, probe=_probe_history)


AMP_UNAVAILABLE: Final = declare(
    "torch.cuda.amp.common:amp_definitely_not_available", "let gradient scalers scale without a GPU"
)
BF16_SUPPORT: Final = declare(
    "torch.cuda:is_bf16_supported", "let autocast use bfloat16 where the GPU has it"
)
CLEAR_AUTOCAST_CACHE: Final = declare(
    "torch:clear_autocast_cache", "forget casts when PyTorch does"
)
AUTOCAST_CAST: Final = declare(
    "torch.amp.autocast_mode:_cast",
    "cast for custom_fwd(cast_inputs=…)",
    probe=has_parameters("torch.amp.autocast_mode:_cast", "value", "device_type", "dtype"),
)
CHECKPOINT_DEVICE: Final = declare(
    "torch.utils.checkpoint:_infer_device_type",
    "let checkpoints enter autocast again as on a GPU",
    probe=has_parameters("torch.utils.checkpoint:_infer_device_type", "args"),
)
AUTOCAST_BY_DEVICE: Final = (
    declare(
        "torch.amp.autocast_mode:autocast.__init__",
        "enter autocast for the device of a meta tensor",
    ),
    declare(
        "torch:is_autocast_enabled", "answer for the device of a meta tensor whether autocast is on"
    ),
    declare(
        "torch:get_autocast_dtype", "answer for the device of a meta tensor which type autocast has"
    ),
)
"""Functions of autocast that take a device by its name."""
SCALER_STEP: Final = declare(
    "torch.amp.grad_scaler:GradScaler._maybe_opt_step",
    "let gradient scalers step without reading whether gradients overflow",
    probe=has_parameters(
        "torch.amp.grad_scaler:GradScaler._maybe_opt_step", "self", "optimizer", "optimizer_state"
    ),
)
SCALER_SCALE: Final = declare(
    "torch.amp.grad_scaler:GradScaler.get_scale", "answer for the scale, which has no value"
)
SCALER_GROWTH: Final = declare(
    "torch.amp.grad_scaler:GradScaler._get_growth_tracker",
    "answer for the growth tracker, which has no value",
)


def initial_scale(scaler: Any) -> float:
    """The scale that a ``GradScaler`` begins with; 1 for one that is switched off."""
    return float(scaler._init_scale) if scaler._enabled else 1.0


def initial_growth(scaler: Any) -> int:
    """The growth tracker that a ``GradScaler`` begins with; 0 for one that is switched off."""
    return int(scaler._init_growth_tracker) if scaler._enabled else 0


def _probe_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    check(
        initial_scale(scaler) == 8.0 and initial_growth(scaler) == 0,
        "a scaler does not begin with the scale that it is given",
    )
    check(
        initial_scale(torch.amp.GradScaler("cpu", enabled=False)) == 1.0,
        "a scaler that is switched off has a scale",
    )


declare(
    "torch.amp.grad_scaler:GradScaler.__init__",
    "read the scale that a scaler begins with",
    probe=_probe_scaler,
)


SDP_BACKENDS: Final = {0: "math", 1: "flash", 2: "memory_efficient", 3: "cudnn"}
"""Number in ``at::SDPBackend`` → name of the kernel."""


def kernel_order() -> tuple[str, ...]:
    """The kernels in the order in which PyTorch tries them."""
    return tuple(
        SDP_BACKENDS[number]
        for number in torch._C._get_sdp_priority_order()
        if number in SDP_BACKENDS
    )


def enabled_kernels() -> frozenset[str]:
    """The kernels that are switched on: users switch them in their code, even around single
    calls."""
    cuda: Any = torch.backends.cuda
    switches = {
        "flash": cuda.flash_sdp_enabled,
        "memory_efficient": cuda.mem_efficient_sdp_enabled,
        "cudnn": cuda.cudnn_sdp_enabled,
        "math": cuda.math_sdp_enabled,
    }
    return frozenset(name for name, is_enabled in switches.items() if is_enabled())


def _probe_kernel_order() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels: Any = (
        SDPBackend.MATH,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    )
    check(
        [int(kernel) for kernel in kernels] == list(SDP_BACKENDS), "the kernels have other numbers"
    )
    check(
        set(kernel_order()) == set(SDP_BACKENDS.values()),
        f"the order of kernels is {kernel_order()}",
    )
    with sdpa_kernel([SDPBackend.MATH]):
        check(
            enabled_kernels() == {"math"},
            f"with the math kernel alone, {sorted(enabled_kernels())} are switched on",
        )


declare(
    "torch._C:_get_sdp_priority_order",
    "choose the attention kernel that PyTorch would choose",
    probe=_probe_kernel_order,
)


_DYNAMO: Final = "torch._dynamo"
_DISABLED: Final = "__dynamo_disable"
"""Attribute in which PyTorch keeps the function that Dynamo has excluded from compilation."""


class _Placeholder(ModuleType):
    """``torch._dynamo`` until something needs the real one."""

    def __init__(self) -> None:
        super().__init__(_DYNAMO)
        self.disabled: list[Any] = []

    def disable(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Callable[..., Any]:
        """Return the function unchanged: without Dynamo nothing compiles it."""
        self.disabled.append(function)
        return function

    def graph_break(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no graph is recorded."""

    def __getattr__(self, name: str) -> Any:
        if name in (
            "__spec__",
            "__wrapped__",
            "__file__",
        ):  # ``inspect`` reads these of every loaded module
            raise AttributeError(name)
        _withdraw(self)
        return getattr(import_module(_DYNAMO), name)


def _withdraw(placeholder: _Placeholder) -> None:
    """Remove the placeholder, so that the next import of ``torch._dynamo`` loads the real
    module."""
    if sys.modules.get(_DYNAMO) is placeholder:
        del sys.modules[_DYNAMO]
        vars(torch).pop("_dynamo", None)
    for function in placeholder.disabled:
        vars(function).pop(_DISABLED, None)
    placeholder.disabled.clear()


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Context in which only code that uses Dynamo loads it; without effect where it is loaded
    already."""
    if _DYNAMO in sys.modules:
        yield
        return
    placeholder = _Placeholder()
    sys.modules[_DYNAMO] = placeholder
    vars(torch)["_dynamo"] = placeholder
    try:
        yield
    finally:
        _withdraw(placeholder)


def _probe_dynamo() -> None:
    from torch._compile import _disable_dynamo

    if _DYNAMO in sys.modules and not isinstance(sys.modules[_DYNAMO], _Placeholder):
        return  # it is loaded already, and there is nothing to keep away
    with without_dynamo():

        @_disable_dynamo
        def excluded() -> int:
            return 1

        check(excluded() == 1, "a function that Dynamo is to leave out does not run")
        check(
            isinstance(sys.modules.get(_DYNAMO), _Placeholder),
            "a function that Dynamo is to leave out loads it",
        )


declare(
    "torch._compile:_disable_dynamo",
    "keep optimizers and checkpoints from importing Dynamo",
    probe=_probe_dynamo,
)


# Several GPUs: process groups, ``DistributedDataParallel`` and ``fully_shard``.  Importing
# ``torch.distributed`` takes a second; so each name is looked up when it is used.

_declare_parallel: Final = partial(declare, use=PARALLEL)

_C10D: Final = ("torch.distributed", "torch.distributed.distributed_c10d")
_OBJECT_COLLECTIVES: Final = (
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "broadcast_object_list",
)
_FULLY_SHARD: Final = "torch.distributed.fsdp._fully_shard"
_GROUP: Final = f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup"

OBJECT_COLLECTIVES: Final = {
    name: tuple(
        _declare_parallel(f"{module}:{name}", "exchange Python objects among simulated ranks")
        for module in _C10D
    )
    for name in _OBJECT_COLLECTIVES
}
"""Name of a collective for Python objects → where PyTorch has it."""

INIT_PROCESS_GROUP: Final = tuple(
    _declare_parallel(
        f"{module}:init_process_group", "let a script start a simulated process group"
    )
    for module in (*_C10D, "torch.distributed.device_mesh")
)
DESTROY_PROCESS_GROUP: Final = tuple(
    _declare_parallel(
        f"{module}:destroy_process_group", "keep a simulated process group until the script ends"
    )
    for module in _C10D
)
GET_BACKEND: Final = tuple(
    _declare_parallel(f"{module}:get_backend", "answer with the backend that a script asked for")
    for module in _C10D
)
SPAWN: Final = _declare_parallel(
    "torch.multiprocessing:spawn", "run the first of several processes in this one"
)
FSDP1_INIT: Final = _declare_parallel(
    "torch.distributed.fsdp:FullyShardedDataParallel.__init__", "refuse FullyShardedDataParallel"
)
"""The first generation of FSDP, which is not traced."""

DDP_INIT: Final = _declare_parallel(
    "torch.nn.parallel:DistributedDataParallel.__init__",
    "put replicas on meta tensors",
    probe=has_parameters(
        "torch.nn.parallel:DistributedDataParallel.__init__",
        "self",
        "module",
        "device_ids",
        "output_device",
    ),
)
DDP_PRE_FORWARD: Final = _declare_parallel(
    "torch.nn.parallel:DistributedDataParallel._pre_forward",
    "know what replicas allocate to communicate",
)
SYNC_BATCH_NORM: Final = _declare_parallel(
    "torch.nn:SyncBatchNorm.forward", "run synchronized batch norms, whose kernels are CUDA's alone"
)
VERIFY_SHAPES: Final = _declare_parallel(
    "torch.nn.parallel.distributed:_verify_param_shape_across_processes",
    "skip a comparison with ranks that do not exist",
)

DEVICE_MODULE: Final = declare(
    "torch:meta", "give fully_shard the streams of a simulated GPU", use=PARALLEL, is_created=True
)
"""Where PyTorch looks for the module of the meta device, as ``torch.cuda`` is that of CUDA; there
is none."""
ACCELERATOR_STREAM: Final = _declare_parallel(
    "torch.accelerator:current_stream", "give the streams of a simulated GPU"
)
RNG_SUPPORT: Final = _declare_parallel(
    "torch.distributed.tensor._dispatch:is_rng_supported_mesh", "leave random numbers to each rank"
)
MESH_DEVICE: Final = _declare_parallel(
    f"{_FULLY_SHARD}._fully_shard:_get_device_from_mesh",
    "shard on meta tensors",
    probe=has_parameters(f"{_FULLY_SHARD}._fully_shard:_get_device_from_mesh", "mesh"),
)
MOVE_STATES: Final = _declare_parallel(
    f"{_FULLY_SHARD}._fsdp_init:_move_states_to_device",
    "know which tensors fully_shard brings to the GPU",
    probe=has_parameters(
        f"{_FULLY_SHARD}._fsdp_init:_move_states_to_device", "params", "buffers", "device"
    ),
)
NO_META_CHECK: Final = _declare_parallel(f"{_GROUP}._validate_no_meta_params", "shard meta tensors")
OFFLOAD_CHECK: Final = _declare_parallel(
    f"{_GROUP}._validate_cpu_offload_params", "refuse offloading to host memory"
)
COMMUNICATING_METHODS: Final = tuple(
    _declare_parallel(f"{_GROUP}.{method}", "know what is allocated to communicate")
    for method in ("unshard", "wait_for_unshard", "post_backward")
)
_MODULE_STATES: Final = _declare_parallel(
    "torch.distributed._composable_state:_module_state_mapping", "leave a sharded model as it was"
)
_FAKE_STORE: Final = _declare_parallel(
    "torch.testing._internal.distributed.fake_pg:FakeStore",
    "start a process group without processes",
)


def fake_store() -> Any:
    """A store for a process group whose other ranks do not exist."""
    return _FAKE_STORE.value()()


def forget_sharding(module: nn.Module) -> None:
    """Remove what ``fully_shard`` remembers of a module."""
    _MODULE_STATES.value().pop(module, None)


def resolve_process_group(name: str) -> Any:
    """The process group of that name.

    Raises:
        RuntimeError: there is none.
    """
    return torch.distributed.distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


def finished_work(future: torch.futures.Future[Any]) -> Any:
    """The handle that a collective returns, of one that is finished."""
    return torch._C._distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]


def is_sharded(kind: type) -> bool:
    """Whether tensors of a class are parts of larger ones whose rest other ranks hold."""
    tensors = sys.modules.get(
        "torch.distributed.tensor"
    )  # without it there are none, and to load it takes a second
    return tensors is not None and issubclass(kind, tensors.DTensor)


def _probe_work() -> None:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([torch.empty(1, device="meta")])
    check(finished_work(future) is not None, "a finished collective has no handle")


_declare_parallel(
    "torch.distributed.distributed_c10d:_resolve_process_group",
    "know the process group of a functional collective",
)
_declare_parallel(
    "torch._C:_distributed_c10d._create_work_from_future",
    "answer collectives at once",
    probe=_probe_work,
)
_declare_parallel(
    "torch.distributed.tensor:DTensor._local_tensor", "know the part of a tensor that a rank holds"
)
