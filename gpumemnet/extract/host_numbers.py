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
from torch.utils.flop_counter import flop_registry

from gpumemnet.extract.known_layouts import argument_tensors
from gpumemnet.torch_private import script as names
from gpumemnet.torch_private.names import (
    id_of_storage,
    storage_id,
    tree_leaves,
    tree_map_only,
)

MOST_NUMBERS: Final = 2**20
"""Largest number of elements of such a tensor."""
_MADE_UP_BYTES: Final = 2**26
"""Largest storage whose numbers are made up as a whole."""
_MOST_MADE_UP: Final = 2**22
"""Largest number of elements of which an operator computes, where numbers are made up."""
_MOST_FACTORS: Final = 2**16
"""The same for products of matrices and convolutions."""
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
        self.makes_up = False
        """Whether numbers that are not known are made up: normally distributed, with what follows
        from them computed, where that takes little."""
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
        if self._has(tensor):
            with names.unseen():
                return self._given(self._view(tensor))
        if self.makes_up and _is_plain(tensor):
            return self._given(self._made_up(tensor))
        return None

    def _made_up(self, tensor: Tensor) -> Tensor:
        """Make up numbers of a tensor, and of what else is in its storage."""
        storage = tensor.untyped_storage()
        is_kept = tensor.numel() <= MOST_NUMBERS and storage.nbytes() <= _MADE_UP_BYTES
        with names.unseen():
            shape = storage.nbytes() // tensor.element_size() if is_kept else tensor.shape
            made = torch.zeros(shape, dtype=tensor.dtype)
            if tensor.dtype == torch.bool:
                made.bernoulli_()
            elif made.is_floating_point():
                made.normal_()
            if not is_kept:
                return made
            self._kept.add(id_of_storage(storage))
            self._storages[storage] = made.untyped_storage()
            return self._view(tensor)

    def arguments(
        self, func: Any, tensors: list[Tensor], args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of an operator as real tensors; ``None`` unless its result follows
        from their numbers."""
        if self.makes_up:
            most = _MOST_FACTORS if func.overloadpacket in flop_registry else _MOST_MADE_UP
            if sum(each.numel() for each in tensors) > most or not all(map(_is_plain, tensors)):
                return None
        elif (
            not self._storages
            or not all(
                self._has(tensor) if self._unknown(tensor) else tensor.numel() <= MOST_NUMBERS
                for tensor in tensors
            )
            or torch.Tag.nondeterministic_seeded in func.tags
        ):
            return None
        real: Any = tree_map_only(Tensor, self.of, (args, named))
        if "device" in named:
            real[1]["device"] = _HOST
        return real

    def follow(
        self, func: Any, args: tuple[Any, ...], named: dict[str, Any], result: Any, *, writes: bool
    ) -> None:
        """Compute what an operator has made, or has written, where numbers are made up."""
        made = argument_tensors([result], {})
        if "empty" in func.__name__ or any(each.numel() > MOST_NUMBERS for each in made):
            return
        if writes or not all(map(self._has, made)):
            arguments = self.arguments(func, argument_tensors(args, named), args, named)
            if arguments is not None:
                self.compute(func, arguments, result)

    def compute(
        self, func: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]], result: Any
    ) -> None:
        """Compute what an operator has made, or has written, of known numbers."""
        made = argument_tensors([result], {})
        if any(each.numel() > MOST_NUMBERS for each in made):
            return
        try:
            with names.unseen():
                numbers = func(*arguments[0], **arguments[1])
        except RuntimeError:  # the host lacks the kernel
            for each in () if self.makes_up else made:
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
            and _is_plain(tensor)
            and storage_id(tensor) in self._kept
            and tensor.untyped_storage() in self._storages
        )

    def _view(self, tensor: Tensor) -> Tensor:
        place = tensor.storage_offset(), tensor.size(), tensor.stride()
        storage = self._storages[tensor.untyped_storage()]
        return _EMPTY(0, dtype=tensor.dtype).set_(storage, *place)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided
