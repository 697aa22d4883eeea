"""The numbers of small meta tensors that come from the host.

Labels, boxes, flags and steps of time are floating-point numbers as activations are, but code reads
them back, or selects by them.  They stay meta tensors, so what is counted does not depend on their
numbers; beside the storage of each there is one on the host.  What an operator makes of known
numbers alone is known, too; what it writes otherwise is not known any more.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from contextlib import suppress
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from gpumemnet.torch_private import script as names
from gpumemnet.torch_private.names import (
    id_of_storage,
    storage_id,
    tree_leaves,
    tree_map_only,
)

MOST_NUMBERS: Final = 2**20
"""Largest number of elements of such a tensor."""
_HOST: Final = torch.device("cpu")
_EMPTY: Final = torch.empty
"""PyTorch's own: ``deepspeed.zero.Init`` replaces it while a model is made."""
_PLAIN: Final = (Tensor, nn.Parameter)


class HostNumbers:
    """The numbers of meta tensors, as far as they are known.

    Args:
        unknown: whether a tensor itself has no numbers.
        given: called with each tensor that gives numbers to code that reads them; returns it.
    """

    def __init__(
        self, unknown: Callable[[Tensor], bool], given: Callable[[Tensor], Tensor]
    ) -> None:
        self._unknown = unknown
        self._given = given
        self._storages: MutableMapping[torch.UntypedStorage, torch.UntypedStorage] = (
            WeakKeyDictionary()
        )
        self._kept: set[int] = set()
        """Numbers of these storages, with those of some that are gone: quicker to ask."""

    def keep(self, tensor: Tensor, numbers: Tensor) -> None:
        """Remember the numbers of a tensor whose storage is new, if they are few."""
        with suppress(NotImplementedError):  # one of the tensors that torch.vmap computes with
            storage = tensor.untyped_storage()
            if not 0 < tensor.numel() <= MOST_NUMBERS:
                return
            self._kept.add(id_of_storage(storage))
            self._storages[storage] = torch.UntypedStorage(storage.nbytes())  # type: ignore[no-untyped-call]
            with names.unseen():
                self._view(tensor).copy_(numbers.detach())

    def stand_in(self, numbers: Tensor) -> Tensor:
        """What is on the GPU for these numbers: a meta tensor, unless they are whole."""
        if not (numbers.is_floating_point() or numbers.is_complex()):
            return numbers
        made = torch.empty_strided(
            numbers.size(), numbers.stride(), dtype=numbers.dtype, device="meta"
        )
        self.keep(made, numbers)
        return made

    def forget(self, tensor: Tensor) -> None:
        """Something unknown is written into a tensor."""
        if self._has(tensor):
            del self._storages[tensor.untyped_storage()]

    def of(self, tensor: Tensor) -> Tensor | None:
        """A real tensor with the same numbers; ``None`` if they are not known."""
        if not self._unknown(tensor):
            return tensor
        if not self._has(tensor):
            return None
        with names.unseen():
            return self._given(self._view(tensor))

    def arguments(
        self, func: Any, tensors: list[Tensor], args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of an operator as real tensors; ``None`` unless its result follows
        from their numbers."""
        if not self._storages or not all(
            self._has(tensor) if self._unknown(tensor) else tensor.numel() <= MOST_NUMBERS
            for tensor in tensors
        ):
            return None
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        real: Any = tree_map_only(Tensor, self.of, (args, named))
        if "device" in named:
            real[1]["device"] = _HOST
        return real  # type: ignore[no-any-return]

    def compute(
        self, func: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]], result: Any
    ) -> None:
        """Compute what an operator has made, or has written, of known numbers."""
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if any(each.numel() > MOST_NUMBERS for each in made):
            return
        try:
            with names.unseen():
                numbers = func(*arguments[0], **arguments[1])
        except RuntimeError:  # the host lacks the kernel
            for each in made:
                self.forget(each)
            return
        for each, found in zip(made, tree_leaves(numbers), strict=False):
            if each.shape != found.shape:  # such as what batch norm saves in evaluation
                self.forget(each)
            elif not self._has(each):
                self.keep(each, found)

    def _has(self, tensor: Tensor) -> bool:
        return (
            tensor.numel() <= MOST_NUMBERS
            and type(tensor) in _PLAIN
            and tensor.layout is torch.strided
            and storage_id(tensor) in self._kept
            and tensor.untyped_storage() in self._storages
        )

    def _view(self, tensor: Tensor) -> Tensor:
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        storage = self._storages[tensor.untyped_storage()]
        return _EMPTY(0, dtype=tensor.dtype).set_(storage, *place)
