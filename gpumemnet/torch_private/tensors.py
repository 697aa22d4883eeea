"""Private names of tensors and storages: identity, reference counts, views."""

from __future__ import annotations

import weakref
from typing import Final

import torch
from torch import Tensor

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
