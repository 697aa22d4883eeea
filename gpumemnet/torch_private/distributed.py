"""Private and replaced names of ``torch.distributed``: process groups, ``DistributedDataParallel``
and ``fully_shard``.

They are needed for jobs on several GPUs alone, and importing them takes a second; so each is looked
up when it is used.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from gpumemnet.torch_private.names import PARALLEL, check, has_parameters
from gpumemnet.torch_private.names import declare as declare_name

declare: Final = partial(declare_name, use=PARALLEL)

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
        declare(f"{module}:{name}", "exchange Python objects among simulated ranks")
        for module in _C10D
    )
    for name in _OBJECT_COLLECTIVES
}
"""Name of a collective for Python objects → where PyTorch has it."""

INIT_PROCESS_GROUP: Final = tuple(
    declare(f"{module}:init_process_group", "let a script start a simulated process group")
    for module in (*_C10D, "torch.distributed.device_mesh")
)
DESTROY_PROCESS_GROUP: Final = tuple(
    declare(
        f"{module}:destroy_process_group", "keep a simulated process group until the script ends"
    )
    for module in _C10D
)
GET_BACKEND: Final = tuple(
    declare(f"{module}:get_backend", "answer with the backend that a script asked for")
    for module in _C10D
)
SPAWN: Final = declare(
    "torch.multiprocessing:spawn", "run the first of several processes in this one"
)
FSDP1_INIT: Final = declare(
    "torch.distributed.fsdp:FullyShardedDataParallel.__init__", "refuse FullyShardedDataParallel"
)
"""The first generation of FSDP, which is not traced."""

DDP_INIT: Final = declare(
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
DDP_PRE_FORWARD: Final = declare(
    "torch.nn.parallel:DistributedDataParallel._pre_forward",
    "know what replicas allocate to communicate",
)
SYNC_BATCH_NORM: Final = declare(
    "torch.nn:SyncBatchNorm.forward", "run synchronized batch norms, whose kernels are CUDA's alone"
)
VERIFY_SHAPES: Final = declare(
    "torch.nn.parallel.distributed:_verify_param_shape_across_processes",
    "skip a comparison with ranks that do not exist",
)

DEVICE_MODULE: Final = declare_name(
    "torch:meta", "give fully_shard the streams of a simulated GPU", use=PARALLEL, is_created=True
)
"""Where PyTorch looks for the module of the meta device, as ``torch.cuda`` is that of CUDA; there
is none."""
ACCELERATOR_STREAM: Final = declare(
    "torch.accelerator:current_stream", "give the streams of a simulated GPU"
)
RNG_SUPPORT: Final = declare(
    "torch.distributed.tensor._dispatch:is_rng_supported_mesh", "leave random numbers to each rank"
)
MESH_DEVICE: Final = declare(
    f"{_FULLY_SHARD}._fully_shard:_get_device_from_mesh",
    "shard on meta tensors",
    probe=has_parameters(f"{_FULLY_SHARD}._fully_shard:_get_device_from_mesh", "mesh"),
)
MOVE_STATES: Final = declare(
    f"{_FULLY_SHARD}._fsdp_init:_move_states_to_device",
    "know which tensors fully_shard brings to the GPU",
    probe=has_parameters(
        f"{_FULLY_SHARD}._fsdp_init:_move_states_to_device", "params", "buffers", "device"
    ),
)
NO_META_CHECK: Final = declare(f"{_GROUP}._validate_no_meta_params", "shard meta tensors")
OFFLOAD_CHECK: Final = declare(
    f"{_GROUP}._validate_cpu_offload_params", "refuse offloading to host memory"
)
COMMUNICATING_METHODS: Final = tuple(
    declare(f"{_GROUP}.{method}", "know what is allocated to communicate")
    for method in ("unshard", "wait_for_unshard", "post_backward")
)
_MODULE_STATES: Final = declare(
    "torch.distributed._composable_state:_module_state_mapping", "leave a sharded model as it was"
)
_FAKE_STORE: Final = declare(
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


declare(
    "torch.distributed.distributed_c10d:_resolve_process_group",
    "know the process group of a functional collective",
)
declare(
    "torch._C:_distributed_c10d._create_work_from_future",
    "answer collectives at once",
    probe=_probe_work,
)
declare(
    "torch.distributed.tensor:DTensor._local_tensor", "know the part of a tensor that a rank holds"
)
