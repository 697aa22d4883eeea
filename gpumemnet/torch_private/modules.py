"""Private and replaced names of tensors, storages and modules: identity, reference counts, views,
parameters, hooks, checkpoints.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, TypeGuard

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from gpumemnet.torch_private.names import PARALLEL, TorchName, check, declare


def storage_id(tensor: Tensor) -> int:
    """A number that views of one tensor share, and that no other living storage has."""
    return int(tensor.untyped_storage()._cdata)


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


def version(tensor: Tensor) -> int:
    """How often ``tensor``, or a tensor that it is a view of, was changed in place."""
    return int(tensor._version)


def part_on_rank(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that this rank holds: all of it, unless it is sharded (a
    ``DTensor``)."""
    held: Tensor = getattr(tensor, "_local_tensor", tensor)
    return held


def _probe_identity() -> None:
    tensor, other = torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta")
    check(
        storage_id(tensor) == storage_id(tensor.t()), "a view has another storage id than its base"
    )
    check(storage_id(tensor) != storage_id(other), "two tensors have one storage id")
    died: list[object] = []
    reference = weakref.ref(tensor.untyped_storage(), died.append)
    check(reference() is not None, "a storage object dies while its tensor lives")
    del tensor
    check(bool(died), "the end of a storage is not noticed")


def _probe_counts() -> None:
    tensor = torch.empty(2, 3, device="meta")
    before = reference_counts(tensor)
    view = tensor.t()
    after = reference_counts(tensor)
    check(
        after[1] == before[1] + 1 and after[0] >= before[0],
        f"a view changes the counts from {before} to {after}",
    )
    del view
    check(reference_counts(tensor)[1] == before[1], "the end of a view does not restore the count")


def _probe_view() -> None:
    leaf = torch.empty(2, device="meta", requires_grad=True)
    check(is_view(leaf[:1]) and not is_view(leaf), "a view is not told from its base")


def _probe_version() -> None:
    tensor = torch.zeros(2)
    before = version(tensor)
    tensor[:1].add_(1)
    check(version(tensor) > before, "a change in place does not raise the version")


declare("torch:UntypedStorage._cdata", "tell which tensors share memory", probe=_probe_identity)
declare(
    "torch:Tensor._use_count",
    "see whether PyTorch would add gradients in place",
    probe=_probe_counts,
)
declare("torch._C:_storage_Use_Count", "see whether PyTorch would add gradients in place")
declare("torch:Tensor._version", "notice that a tensor was changed in place", probe=_probe_version)
declare("torch:Tensor._is_view", "cache the casts of weights as autocast does", probe=_probe_view)

STORAGE_RESIZE: Final[TorchName] = declare(
    "torch:UntypedStorage.resize_",
    "notice that fully_shard gives up gathered parameters",
    use=PARALLEL,
)


CHECKPOINT_FILE: Final = str(torch.utils.checkpoint.__file__)
"""The file whose frames say that a model recomputes a part of itself."""

OWN_DICTS: Final = frozenset(
    name for name, value in vars(nn.Module()).items() if isinstance(value, dict)
)
"""Attributes of every module that are dicts: its parameters, its children, its hooks."""

LOAD: Final = declare("torch:load", "open files of weights without reading the weights")
SET_DEFAULT_DEVICE: Final = declare(
    "torch:set_default_device", "keep code from choosing a device for everything"
)
SET_CUDA_DEVICE: Final = declare(
    "torch.cuda:set_device", "let code choose a GPU where there is none"
)


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


def _probe_hooks() -> None:
    module = nn.Identity()
    hooks = [lambda *arguments: None, lambda *arguments: None]
    module.register_forward_pre_hook(hooks[0])
    module.register_forward_hook(hooks[1])
    check(forward_hooks(module) == hooks, f"a module's hooks are {forward_hooks(module)}")
    check(not is_compiled(module), "a plain module looks compiled")
    module._compiled_call_impl = print
    check(is_compiled(module), "a compiled module looks plain")


def _probe_tables() -> None:
    module = nn.BatchNorm1d(2, device="meta")
    check(
        list(own_parameters(module)) == ["weight", "bias"],
        f"a batch norm's parameters are {list(own_parameters(module))}",
    )
    check(
        "running_mean" in own_buffers(module),
        f"a batch norm's buffers are {list(own_buffers(module))}",
    )
    replacement = nn.Parameter(torch.empty(2, device="meta"))
    own_parameters(module)["weight"] = replacement
    check(module.weight is replacement, "a module does not use the parameter that its dict holds")


def _probe_checkpoint() -> None:
    code: Any = torch.utils.checkpoint.CheckpointFunction.forward.__code__
    check(code.co_filename == CHECKPOINT_FILE, f"checkpoints run in {code.co_filename}")


declare(
    "torch.nn:Module.__init__",
    "put meta tensors in place of a model's parameters and buffers",
    probe=_probe_tables,
)
declare(
    "torch.nn:Module.register_forward_hook", "find hooks that would run twice", probe=_probe_hooks
)
declare(
    "torch.utils.checkpoint:__file__",
    "notice that a model recomputes a part of itself",
    probe=_probe_checkpoint,
)
declare("torch.nn.modules.loss:_Loss", "know a loss of torch.nn")
declare("torch.nn.modules.batchnorm:_BatchNorm", "know a batch norm")
