"""Private and replaced names of PyTorch of training on several GPUs: process groups,
``DistributedDataParallel``, ``DataParallel`` and ``fully_shard``, and how processes and threads start.

Importing ``torch.distributed`` takes a second; so each name is looked up when it is used.
"""

from __future__ import annotations

import sys
from typing import Any, Final

import torch
from torch import nn

from gpumemnet.torch_private.names import value_of

THREAD_START: Final = "threading:Thread.start"
PROCESS_START: Final = "multiprocessing.process:BaseProcess.start"
"""To let processes inherit the simulated GPU."""
FORK: Final = "multiprocessing.context:ForkProcess._Popen"
"""To let processes inherit the simulated GPU."""
BROADCAST: Final = "torch._C:_broadcast_coalesced?"
BROADCAST_ONE: Final = "torch._C:_broadcast?"
SCATTER: Final = "torch._C:_scatter?"
GATHER: Final = "torch._C:_gather?"
"""To answer with more than an empty value, as a CPU build does."""
SCATTER_STREAM: Final = "torch.nn.parallel._functions:_get_stream"
DATA_PARALLEL: Final = "torch.nn:DataParallel.forward"
"""To run the first GPU's share of a batch."""
NAMED_GPUS: Final = "torch.nn.parallel.data_parallel:_check_balance"
"""To know how many GPUs it is made for."""
STATE_DICTS: Final = "torch.distributed.checkpoint.state_dict"
"""Module of the functions that gather what is saved of several ranks."""
CHECKPOINTS: Final = tuple(
    f"torch.distributed.checkpoint.state_dict_{name}" for name in ("saver", "loader")
)
"""Modules of the functions that save and load what several ranks hold."""
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
    name: tuple(f"{module}:{name}" for module in _C10D) for name in _OBJECT_COLLECTIVES
}
"""Name of a collective for Python objects → where PyTorch has it."""

INIT_PROCESS_GROUP: Final = tuple(
    f"{module}:init_process_group" for module in (*_C10D, "torch.distributed.device_mesh")
)
"""To let a script start a simulated process group."""
DESTROY_PROCESS_GROUP: Final = tuple(f"{module}:destroy_process_group" for module in _C10D)
"""To keep a simulated process group until the script ends."""
GET_BACKEND: Final = tuple(f"{module}:get_backend" for module in _C10D)
"""To answer with the backend that a script asked for."""
NEW_GROUP: Final = tuple(f"{module}:new_group" for module in _C10D)
"""To simulate further process groups."""
SPAWN: Final = "torch.multiprocessing:spawn"
"""To run the first of several processes in this one."""
FSDP1_COMMUNICATING: Final = tuple(
    f"torch.distributed.fsdp.{name}"
    for name in (
        "_flat_param:FlatParamHandle.pre_unshard",
        "_flat_param:FlatParamHandle.unshard",
        "_runtime_utils:_get_reduce_scatter_tensors",
    )
)
"""To know what is allocated to communicate."""
FSDP1_VIEWS: Final = tuple(
    f"torch.distributed.fsdp._flat_param:FlatParamHandle._get_unflat_views_{kind}"
    for kind in ("aligned", "unaligned")
)
"""To know on which stream gradients of a flat parameter are joined."""

DDP_INIT: Final = "torch.nn.parallel:DistributedDataParallel.__init__"
"""To put replicas on meta tensors."""
DDP_PRE_FORWARD: Final = "torch.nn.parallel:DistributedDataParallel._pre_forward"
"""To know what replicas allocate to communicate."""
SYNC_BATCH_NORM: Final = "torch.nn:SyncBatchNorm.forward"
"""To run synchronized batch norms, whose kernels are CUDA's alone."""
VERIFY_SHAPES: Final = "torch.nn.parallel.distributed:_verify_param_shape_across_processes"
"""To skip a comparison with ranks that do not exist."""

DEVICE_MODULE: Final = "torch:meta?"
"""Where PyTorch looks for the module of the meta device, as ``torch.cuda`` is that of CUDA; there
is none."""
ACCELERATOR_STREAM: Final = "torch.accelerator:current_stream"
"""To give the streams of a simulated GPU."""
RNG_SUPPORT: Final = "torch.distributed.tensor._dispatch:is_rng_supported_mesh"
"""To leave random numbers to each rank."""
MESH_DEVICE: Final = f"{_FULLY_SHARD}._fully_shard:_get_device_from_mesh"
"""To shard on meta tensors."""
MOVE_STATES: Final = f"{_FULLY_SHARD}._fsdp_init:_move_states_to_device"
"""To know which tensors fully_shard brings to the GPU."""
NO_META_CHECK: Final = f"{_GROUP}._validate_no_meta_params"
"""To shard meta tensors."""
OFFLOAD_CHECK: Final = f"{_GROUP}._validate_cpu_offload_params"
"""To offload shards that are meta tensors."""
SHARD_PARAMETER: Final = f"{_FULLY_SHARD}._fsdp_param:FSDPParam._init_sharded_param"
"""To offload shards to the host."""
SHARDED_SHAPES: Final = (
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached"
)
"""To leave out fake tensors that only tell shapes."""
COMMUNICATING_METHODS: Final = tuple(
    f"{_GROUP}.{method}" for method in ("unshard", "wait_for_unshard", "post_backward")
)
"""To know what is allocated to communicate."""


def fake_store() -> Any:
    """A store for a process group whose other ranks do not exist."""
    return value_of("torch.testing._internal.distributed.fake_pg:FakeStore")()


def forget_sharding(module: nn.Module) -> None:
    """Remove what ``fully_shard`` remembers of a module."""
    value_of("torch.distributed._composable_state:_module_state_mapping").pop(module, None)


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
