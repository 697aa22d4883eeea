"""What a script requests on the simulated GPU: most tensors there are meta tensors.

Tensors on the host stay real, because data loaders and metrics need their values.  Weights are the
exception: PyTorch's own layers allocate them as meta tensors from the start, so that a model of any
size can be built.  Small tensors of whole numbers on the GPU stay real too, such as masks, labels,
lengths and indices, because models read them.  A tensor, meta or real, is on the GPU if the
observer knows its storage there, and on the host otherwise.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpumemnet.tracing.script.observer import ScriptObserver

import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils.weak import WeakTensorKeyDictionary

from gpumemnet.errors import ExtractError
from gpumemnet.extract.host_numbers import MOST_NUMBERS
from gpumemnet.extract.known_layouts import argument_tensors, meta_like
from gpumemnet.extract.module_calls import keeps_values, map_tensors
from gpumemnet.extract.placement import (
    CONSTANTS,
    FILLED,
    KnownValues,
    device_named,
    is_meta,
    is_small,
)
from gpumemnet.extract.sparse_tensors import meta_copy
from gpumemnet.torch_private import script as names
from gpumemnet.torch_private.names import (
    Arguments,
    Function,
    Keywords,
    aten,
    dense_parts,
    is_sparse,
    storage_id,
    without_function_modes,
)
from gpumemnet.tracing.script.read_values import MAX_VALUES, ReadValues
from gpumemnet.tracing.script.simulated_cuda import (
    GPU,
    swap_for_meta,
)

_Move = Callable[[Tensor], Tensor]
_BETWEEN: Final = frozenset(
    {__file__, str(Path(__file__).with_name("present_gpu.py")), *names.WRAPPER_FILES}
)
"""Files that stand between the code that calls PyTorch and :class:`GpuRequests`."""
_HOST: Final = torch.device("cpu")
_META: Final = torch.device("meta")
_KNOWN: Final = (
    CONSTANTS
    | FILLED
    | {
        torch.empty,
        torch.eye,
        torch.randint,
        torch.randperm,
        torch.tril_indices,
        torch.triu_indices,
    }
)
"""Functions that make tensors whose values do not depend on others."""
_GIVEN: Final = frozenset({torch.tensor, torch.as_tensor, Tensor.new_tensor})
"""Functions to which a script gives the numbers, in arrays, say."""
_NEW: Final = frozenset(
    getattr(Tensor, f"new_{what}") for what in ("zeros", "ones", "full", "tensor", "empty")
)
_LIKE: Final = frozenset({torch.zeros_like, torch.ones_like, torch.full_like})
_PLACES: Final = frozenset({Tensor.__getitem__, Tensor.__setitem__})
_ON_NUMBERS: Final = "add div eq ge gt item __bool__ le lt mul ne pow sub sum"
_OF_NUMBERS: Final = _PLACES | {
    getattr(each, name, None) for each in (Tensor, torch) for name in _ON_NUMBERS.split()
}
"""Functions with which a loop computes number by number."""
_FILLED: Final = FILLED | {torch.empty}
_SPARSE_CONSTRUCTORS: Final = frozenset(
    {torch.sparse_coo_tensor, torch.sparse_csr_tensor, torch.sparse_csc_tensor}
)
_OPERATORS_OF_TENSOR: Final = Tensor.__torch_dispatch__
_SET_DATA: Final = Tensor.data.__set__  # type: ignore[attr-defined]  # a property of C++
_HOST_ARRAYS: Final = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__})
_FEW: Final = [(count,) for count in range(1, 17)]
"""The numbers of lists of these shapes are followed, such as a sum and its count."""
_READS: Final = _HOST_ARRAYS | {Tensor.__bool__, Tensor.item, Tensor.__format__}
_SIZE_ERROR: Final = re.compile(r"shape '\[(.+)\]' is invalid for input of size")
_COMPARES: Final = (
    "while checking arguments for",
    "invalid gradient at index",
    "on the same device",
)
"""In errors of functions that compare the devices of their arguments."""
_GPU_NUMBERS: Final = (int, np.int32, np.int64)
"""Types of the number of a GPU."""
_ZERO: Final = torch.zeros(())
_DRAWS: Final = {
    torch.rand: torch.rand,
    torch.rand_like: torch.rand,
    torch.randn: torch.randn,
    torch.randn_like: torch.randn,
}
"""Functions that draw numbers → what draws as many."""
_RANDOM: Final = frozenset((*_DRAWS, torch.normal))


class GpuRequests(TorchFunctionMode):
    """Allocates on the simulated GPU what the script requests there, and gives it values where it
    reads them back."""

    def __init__(self, observer: ScriptObserver, values: ReadValues, known: KnownValues) -> None:
        super().__init__()
        self._observer = observer
        self._values = self.values = values
        self._unknown, self.numbers = known.unknown, known.numbers
        values.numbers = known.numbers
        self._random: MutableMapping[Tensor, None] = WeakTensorKeyDictionary()
        """What the script has drawn on the host, which may be anything."""
        self._constructors = names.device_constructors()
        self.default_device = _HOST
        self._is_default_type = False
        self._without_values = [names.SHARDING_FOLDER]
        _name_of(torch.empty)  # PyTorch lists its functions now: transformers replaces some a while

    def without_values(self, folder: str) -> None:
        """Let code in ``folder`` allocate large tensors on the host without values."""
        self._without_values.append(folder)

    def _needs_no_values(self) -> bool:
        return any(map(called_from, self._without_values))

    def has_values(self, tensor: Tensor) -> bool:
        """Whether the values of ``tensor`` are real."""
        return not tensor.is_meta and not self._unknown(tensor)

    def set_default_device(self, device: object) -> None:
        """Allocate on ``device`` what names none; ``None`` stands for the host."""
        self.default_device = (
            _HOST if device is None else GPU if stands_for_gpu(device) else device_named(device)
        )

    def set_default_tensor_type(self, kind: Any) -> None:
        """Allocate on the device of a type such as ``torch.cuda.FloatTensor``, which may be named."""
        folder, dtype = _tensor_type(kind)
        torch.set_default_dtype(dtype)
        self.set_default_device(GPU if folder == "torch.cuda" else None)
        self._is_default_type = self.default_device == GPU

    def of_default_type(self, make: Callable[..., Tensor], *args: Any, **named: Any) -> Tensor:
        """Put what ``torch.Tensor(…)`` makes where the default type of tensors is."""
        if args and isinstance(args[0], list | tuple):
            args = self._read_lists(args)
        if not self._is_default_type:
            return make(Tensor, *args, **named)
        named.pop("device", None)  # that of the type
        return make(Tensor, *args, **named).to(GPU)

    def _read_lists(self, lists: Arguments) -> Arguments:
        """Read the numbers of tensors in lists, which PyTorch does where no mode sees it."""
        with self:
            read: Arguments = map_tensors(lists, torch.Tensor.item)
        return read

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _OF_NUMBERS and not kwargs:  # such as a table of a million
            most = math.inf if func in _PLACES and type(args[1]) is int else MOST_NUMBERS
            if all(type(each) in (int, float, bool) or self._is_plain(each, most) for each in args):
                with names.below_modes():
                    return func(*args)
        named = dict(kwargs or {})
        if not args and func is not torch.where:  # the rules below look at the first argument
            args = tuple(named.pop(name) for name in ("data", "input", "tensors") if name in named)
        given = args[0] if args and isinstance(args[0], Tensor) else None
        tensors = argument_tensors(args, {})
        for tensor in tensors:
            if self._is_trained(tensor):
                swap_for_meta(tensor, self._meta_on_gpu(tensor).requires_grad_())
        if given is not None:
            if func in (Tensor.type_as, torch.as_tensor, torch.asarray):
                func = Tensor.to
            if func in (Tensor.to, Tensor.cuda, Tensor.cpu):
                return self._move(func, given, args[1:], named)
            if func is Tensor.share_memory_ and (
                given.is_meta or self._observer.device_of(given) == GPU
            ):
                return given  # as for CUDA tensors, which processes share anyway
            if (
                func is Tensor.__deepcopy__
                and keeps_numbers(given)
                and self._observer.device_of(given) == GPU
            ):
                args[1][id(given)] = copied = given.clone()  # its copy is on the GPU
                return copied
            if func is Tensor.get_device and self._observer.device_of(given) == GPU:
                return GPU.index
            if func is Tensor.data_ptr and given.is_meta:
                return storage_id(given) + given.storage_offset() * given.element_size()
            if func is Tensor.is_set_to and given.is_meta:
                places = {(storage_id(each), each.storage_offset()) for each in tensors}
                return len(places) == len({(each.size(), each.stride()) for each in tensors}) == 1
            if func is Tensor.type:
                if len(args) + len(named) > 1:
                    return self._convert(given, *args[1:], **named)
                return self._type_name(given)
            if func is Tensor.new and self._observer.device_of(given) == GPU:
                return self._new(given, *args[1:], **named)
            if func == _SET_DATA and given.is_meta != args[1].is_meta:  # both are meta then
                return swap_for_meta(
                    given, meta_like(args[1]) if given.is_meta else args[1].detach()
                )
            if getattr(func, "__name__", "") == "__get__" and (
                given.is_meta or self._observer.device_of(given) == GPU
            ):
                return self._attribute(func, args, named)
            is_unknown = self._unknown(given)
            if func is Tensor.__setitem__ and given.is_meta and isinstance(args[2], int | float):
                args = (*args[:2], torch.tensor(args[2], dtype=given.dtype))  # as on a GPU
            if (
                func is Tensor.__setitem__
                and _passes_gradient(args[2])
                and given.is_floating_point()
                and not (given.is_meta or self._observer.device_of(given) == GPU)
            ):
                with suppress(RuntimeError):  # something refers to it weakly
                    swap_for_meta(given, self._stand_in_on_host(given))  # as its gradient is
            if func in _PLACES and given.is_meta:  # PyTorch puts lists on the device, unseen
                args = (args[0], _as_index(args[1]), *args[2:])
            if is_unknown and func in _READS:
                known = self.numbers.of(given)
                if known is not None and self.numbers.is_own(given):
                    return func(known, *args[1:], **named)
                given = given if known is None else known
            if is_unknown or self._values.is_assumed(given):
                if func is Tensor.__bool__:
                    return self._values.condition(given)
                if func is Tensor.item:
                    return self._values.item(given)
            if func in _HOST_ARRAYS and (
                is_unknown or self._values.is_assumed(given, is_picked=False)
            ):
                if func is Tensor.tolist and given.is_meta and given.shape in _FEW:
                    return list(map(self._values.item, given.unbind()))
                copy = self._values.on_host(_name_of(func), given, is_lost=True)
                return func(copy, *args[1:], **named)
            if is_unknown and func is Tensor.__format__ and given.ndim == 0:
                return format(self._values.item(given), args[1])
            if is_unknown and func in (Tensor.__format__, Tensor.__repr__):
                return self._shown(given)
        if func in (torch.tensor, torch.as_tensor) and given is None and tensors:
            args = self._read_lists(args)
        makes_new = func in _RANDOM or func in self._constructors
        if not (named or makes_new) and tensors and all(map(self._is_plain, tensors)):
            with names.below_modes():  # which takes a few times as long
                return func(*args)
        if func in _SPARSE_CONSTRUCTORS and any(
            isinstance(arg, Tensor) and self._observer.device_of(arg) == GPU for arg in args
        ):
            args = tuple(self._meta_on_gpu(arg) if isinstance(arg, Tensor) else arg for arg in args)
        if func is torch.device and args and type(args[0]) in _GPU_NUMBERS:
            return torch.device("cuda", int(args[0]))
        device = named.get("device")
        if device is None and self.default_device != _HOST and func in self._constructors:
            device = named["device"] = self.default_device
        draw = (
            partial(self._observer.drawn_by, func) if func in (torch.rand, torch.randint) else func
        )
        is_weight = func is torch.empty and called_from(names.LAYERS_FOLDER)
        if is_weight and device is None:
            return func(*args, **{**named, "device": _META})  # it goes to the GPU with its module
        if is_meta(device) and (is_weight or not called_from(names.TORCH_FOLDER)):
            with self._observer.recorder.absent():
                result = func(*args, **named)
            self._observer.deferred(result)
            return result
        if device is not None and stands_for_gpu(device):
            if getattr(named.get("generator"), "device", GPU).type != GPU.type:  # as PyTorch says
                raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
            named["device"] = _META
            named.pop("pin_memory", None)
            result = func(*args, **named)
            if isinstance(result, Tensor):
                is_known = given is None and func in _KNOWN and not is_weight
                is_few = result.numel() <= MOST_NUMBERS
                if func is torch.empty and is_known and not (is_few and keeps_numbers(result)):
                    self.numbers.keep(result, _ZERO)
                elif is_known:
                    make = partial(draw, *_fixed(args), **{**named, "device": _HOST})
                    if is_few and (keeps_numbers(result) or _is_constant(func, args, result)):
                        result = make()
                        if func is torch.empty:  # which elements are written to
                            result.zero_()
                    else:
                        self._know(func, result, make)
                self._observer.arrived(result, _name_of(func))
                self._draw(func, result)
            return result
        named.pop("pin_memory", None)
        if func in _FILLED and self._needs_no_values():
            dtype = named.get("dtype") or torch.get_default_dtype()
            if dtype.is_floating_point:
                return self._on_host(partial(func, *args, **{**named, "device": _META}))
        try:
            result = draw(*args, **named)
        except RuntimeError as error:
            if "Class values must be" in str(error):  # one_hot's check, which a GPU does not make
                return func(torch.zeros_like(args[0]), *args[1:], **named)
            viewed = _SIZE_ERROR.search(str(error))
            if viewed and self._values.selections and given is not None and given.is_meta:
                return self._as_selected(given, list(map(int, viewed[1].split(","))))
            if "returned an" in str(error) or not any(each in str(error) for each in _COMPARES):
                raise
            # it compares devices before any operator runs: its known numbers become meta, too
            held = [each for each in argument_tensors(args, named) if each.is_meta]
            is_on_gpu = any(self._observer.device_of(each) == GPU for each in held)
            as_others = self._meta_on_gpu if is_on_gpu else meta_like
            args, named = map_tensors((args, named), as_others)
            result = func(*args, **named)
        if device is None:
            self._follow_arguments(func, args, named, result)
        if given is not None:
            if device is None:
                self._observer.stays_deferred(given, result)
            is_like = func in _LIKE and not called_from(names.TORCH_FOLDER)
            is_known = (is_like or func in _NEW) and len(tensors) == 1
            if is_known and result.is_meta:
                made_like = Tensor.new_zeros if func is Tensor.new_empty else func
                shape, dtype = given.shape if is_like else (0,), given.dtype
                others = _fixed(args[1:])

                def real() -> Tensor:
                    return made_like(torch.empty(shape, dtype=dtype), *others, **named)

                self._know(func, result, real)
        if func in _RANDOM:
            self._random[result] = None
            self._draw(func, result)
        if args:
            self._values.learn(func, args, named, result)
        return result

    def _know(self, func: Function, made: Tensor, make: Callable[[], Tensor]) -> None:
        """Remember the numbers of a new tensor; those that the script gives it may change later."""
        if func not in _GIVEN:
            self.numbers.make(made, make)
        elif made.numel() <= MOST_NUMBERS:
            with names.unseen():
                self.numbers.keep(made, make())

    def _draw(self, func: Function, made: Tensor) -> None:
        """What is drawn on the GPU may be anything, but a mask of many has its share."""
        if func in _DRAWS and made.is_meta:
            self.numbers.draw(made, partial(_DRAWS[func], made.shape, dtype=made.dtype))

    def _is_plain(self, tensor: Tensor, most: float = MOST_NUMBERS) -> bool:
        """Whether a tensor is few numbers on the host, of which nothing else is to be known."""
        return not (
            type(tensor) is not Tensor
            or tensor.requires_grad
            or tensor.numel() > most
            or self._unknown(tensor)
            or self._values.is_assumed(tensor)
            or self._observer.recorder.holds(tensor)
        )

    def _as_selected(self, given: Tensor, shape: list[int]) -> Tensor:
        """Return what was selected by values in the shape that tells how much it is."""
        known = math.prod(size for size in shape if size >= 0)
        count = given.numel() // known * known if -1 in shape else known
        with without_function_modes():
            result = given.flatten()[:count].view(shape)
        self._values.note("Tensor.view", f" took what was selected for {count:,} elements")
        return result

    def _follow_arguments(
        self, func: Function, args: Arguments, named: Keywords, result: object
    ) -> None:
        """A function of a tensor on the GPU returns tensors there: PyTorch allocates some of them
        within the function, on the device that this tensor has in the trace."""
        made = argument_tensors((result,), {})
        if any(hasattr(each, "fake_mode") for each in made):
            return  # PyTorch asks for shapes, such as those of a whole DTensor
        if not made or any(self._observer.device_of(each) == GPU for each in made):
            return
        given = argument_tensors(args, named)
        devices = {each.device for each in given if self._observer.device_of(each) == GPU}
        if devices:
            own = {storage_id(part) for each in given for part in dense_parts(each)}
            for each in made:  # but a view, or what was written into, stays
                if each.device in devices and own.isdisjoint(map(storage_id, dense_parts(each))):
                    self._observer.arrived(each, _name_of(func))

    def _is_trained(self, tensor: Tensor) -> bool:
        """Whether a constant on the GPU gets a gradient, which is on the meta device."""
        return (
            not tensor.is_meta
            and tensor.requires_grad
            and tensor.is_leaf
            and self._observer.device_of(tensor) == GPU
        )

    def _type_name(self, tensor: Tensor) -> str:
        """The name of the type of a tensor, as ``tensor.type()`` returns it."""
        folder = "torch.cuda" if self._observer.device_of(tensor) == GPU else "torch"
        short = next(
            (name for name, dtype in names.TENSOR_TYPES.items() if dtype == tensor.dtype), "Tensor"
        )
        return f"{folder}.{'sparse.' if is_sparse(tensor) else ''}{short}"

    def _new(self, like: Tensor, *args: Any, **named: Any) -> Tensor:
        """Run ``tensor.new(…)``, which makes a tensor of the same type on the GPU."""
        if is_sparse(like) and len(args) > 1:
            return torch.sparse_coo_tensor(*args, check_invariants=False)
        if len(args) == 1 and not isinstance(args[0], int | Tensor | torch.Size):
            with self:
                return torch.tensor(*args, dtype=like.dtype, device=GPU)
        if not like.is_meta:
            like = torch.empty(0, dtype=like.dtype, device=_META)
        made: Tensor = like.new(*args, **named)
        if not argument_tensors(args, {}):
            self.numbers.keep(made, _ZERO)
        self._observer.arrived(made, "new")
        return made

    def _shown(self, tensor: Tensor) -> str:
        return f"tensor(..., device='{self._observer.device_of(tensor)}', size={tuple(tensor.shape)}, dtype={tensor.dtype})"

    def _convert(self, given: Tensor, dtype: Any = None, non_blocking: bool = False) -> Tensor:
        """Run ``tensor.type("torch.cuda.FloatTensor")`` and the like, which may move the tensor
        too."""
        if isinstance(dtype, torch.dtype):
            return self._move(Tensor.to, given, (dtype,), {})
        folder, element_type = _tensor_type(dtype)
        device = GPU if folder == "torch.cuda" else _HOST
        return self._move(Tensor.to, given, (device, element_type), {})

    def _attribute(self, func: Function, args: Arguments, named: Keywords) -> Any:
        """Return ``tensor.device`` and the like as on a GPU; PyTorch's own code sees the meta
        device."""
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        kinds = {"is_cuda": "cuda", "is_cpu": "cpu", "is_meta": "meta"}
        if name != "device" and name not in kinds:
            result = func(*args, **named)
            if isinstance(result, Tensor):
                self._values.learn(func, args, named, result)
            return result
        is_for_torch = called_from(names.TORCH_FOLDER, *names.DEVICE_READERS)
        device = _META if is_for_torch else self._observer.device_of(args[0])
        return device if name == "device" else device.type == kinds[name]

    def _move(self, func: Function, given: Tensor, args: Arguments, named: Keywords) -> Tensor:
        """Run ``to``, ``cuda`` or ``cpu``: a new tensor if its device or type changes."""
        is_on_gpu = self._observer.device_of(given) == GPU
        if func is Tensor.cpu:
            return self._back_to_host(given, "Tensor.cpu") if is_on_gpu else given
        device, dtype, copies = (
            (GPU, None, False) if func is Tensor.cuda else parse_target(args, named, self._observer)
        )
        converted = given
        if dtype is not None and dtype != given.dtype:
            convert = partial(given.to, dtype)
            converted = convert() if is_on_gpu or not given.is_meta else self._on_host(convert)
            self._observer.stays_deferred(given, converted)
        if is_meta(device) and not called_from(names.TORCH_FOLDER):  # accelerate's empty weights
            return self.to_meta(converted)
        if device is None or (is_on_gpu and stands_for_gpu(device)):
            if converted is given and (copies or "memory_format" in named):
                return given.to(
                    given.dtype,
                    copy=copies,
                    memory_format=named.get("memory_format", torch.preserve_format),
                )
            return converted
        if stands_for_gpu(device):
            stands_for_host = converted.is_meta and not is_on_gpu
            back = self._stand_in_on_host if stands_for_host else self._back_to_host
            return self._with_graph(converted, self._to_gpu, back)
        return self._back_to_host(converted) if is_on_gpu else converted

    def _back_to_host(self, tensor: Tensor, function: str = "Tensor.to") -> Tensor:
        return self._with_graph(tensor, partial(self._to_host, function), self._to_gpu)

    def _with_graph(self, tensor: Tensor, move: _Move, back: _Move) -> Tensor:
        """Move a tensor; its gradient moves back."""
        is_plain = type(tensor) in (Tensor, nn.Parameter) and not is_sparse(tensor)
        if is_plain and tensor.requires_grad and torch.is_grad_enabled():
            return _Moved.apply(tensor, move, back)  # type: ignore[no-untyped-call]
        return move(tensor)

    def to_meta(self, tensor: Tensor) -> Tensor:
        """A tensor that takes no memory until it is moved, in the place of ``tensor``."""
        if self._observer.device_of(tensor) == _META:
            return tensor
        with self._observer.recorder.absent():
            empty = torch.empty_like(tensor, device=_META, requires_grad=tensor.requires_grad)
        self._observer.deferred(empty)
        return empty

    def moved_to_host(self, tensor: Tensor, *, is_buffer: bool) -> Tensor:
        """What a module that moves to the host has there in the place of ``tensor``: a meta tensor,
        unless its numbers are known."""
        if self._observer.device_of(tensor) != GPU:
            return tensor
        has_numbers = is_buffer and self.numbers.of(tensor) is not None
        if has_numbers or is_sparse(tensor) or not tensor.is_meta:
            return self._to_host("Module.to", tensor)
        return self._stand_in_on_host(tensor)

    def _stand_in_on_host(self, tensor: Tensor) -> Tensor:
        return self._on_host(partial(torch.empty_like, tensor, device="meta"))

    def _to_host(self, function: str, tensor: Tensor) -> Tensor:
        """A copy on the host: zeros where the values are unknown, or a meta tensor where those
        would take too much memory."""
        if is_sparse(tensor):
            return meta_copy(tensor)
        known = self.numbers.of(tensor)
        most = 0 if tensor.is_floating_point() and self._needs_no_values() else MAX_VALUES
        if known is None and tensor.numel() > most:
            return self._stand_in_on_host(tensor)
        if known is None and self._values.are_made_up:
            known = self.numbers.of(tensor)
        if known is not None:
            copy = known.to(_HOST, copy=True)
            return copy if known is tensor else self._values.assumed(copy)
        return self._values.on_host(function, tensor, is_lost=False)

    def _on_host(self, make: Callable[[], Tensor]) -> Tensor:
        """A meta tensor that stands for one on the host."""
        recorder = self._observer.recorder
        with recorder.absent():
            made = make()
        recorder.host.allocated(made.untyped_storage())
        return made

    def weight_on_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A weight on the host, whose values are not needed."""
        with without_function_modes():
            return self._on_host(partial(torch.empty, shape, dtype=dtype, device="meta"))

    def _meta_on_gpu(self, tensor: Tensor) -> Tensor:
        """A part of a sparse tensor, whose parts are all on one device."""
        if tensor.is_meta:
            return tensor
        part = meta_like(tensor)
        self.numbers.keep(part, tensor)
        self._observer.arrived(part, "to")
        return part

    def _to_gpu(self, tensor: Tensor) -> Tensor:
        if is_sparse(tensor):
            arrived = meta_copy(tensor)
            for part, known in zip(dense_parts(arrived), dense_parts(tensor), strict=True):
                if not self._unknown(known):
                    self.numbers.keep(part, known)
        elif tensor.layout is not torch.strided:
            raise ExtractError(
                f"tensors with the layout {tensor.layout} are not traced on the GPU, but COO, CSR and CSC are"
            )
        elif keeps_numbers(tensor) and not self._unknown(tensor):
            arrived = tensor.clone()
        else:
            arrived = torch.empty_like(meta_like(tensor))  # which is dense
            is_drawn = tensor in self._random and not self.numbers.makes_up
            if self._unknown(tensor):
                if self.numbers.follows([tensor]):  # they came from the GPU, and go back
                    self.numbers.compute(aten.clone.default, (tensor,), {}, arrived)
            elif not (is_drawn and tensor.requires_grad):
                self.numbers.keep(arrived, tensor, is_drawn=is_drawn)
        kind = type(tensor)
        if kind not in (Tensor, nn.Parameter) and kind.__torch_dispatch__ == _OPERATORS_OF_TENSOR:
            arrived = arrived.as_subclass(kind)
        if tensor.requires_grad:
            arrived.requires_grad_()
        self._observer.arrived(arrived, "to", is_weight=tensor.is_meta)
        return arrived


class _Moved(torch.autograd.Function):
    """A copy on another device."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, move: _Move, back: _Move) -> Tensor:
        ctx.back = back
        return move(tensor.detach())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with without_function_modes():
            return ctx.back(gradients[0]), None, None


def _tensor_type(kind: Any) -> tuple[str, torch.dtype]:
    """Return the module and the type of the elements of a type of tensors, or of its name."""
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
    folder, _, short = name.rpartition(".")
    if name == "torch.Tensor":
        return folder, torch.get_default_dtype()
    if short not in names.TENSOR_TYPES:
        raise ValueError(f"invalid type: {name!r}")
    return folder, names.TENSOR_TYPES[short]


def parse_target(
    args: Arguments, named: Mapping[str, Any], observer: ScriptObserver
) -> tuple[torch.device | None, torch.dtype | None, bool]:
    """Return device, type and copy of a call of ``to``."""
    device: Any = named.get("device")
    dtype: torch.dtype | None = named.get("dtype")
    for value in args:
        if isinstance(value, Tensor):
            device, dtype = observer.device_of(value), value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, str | torch.device) or (type(value) in _GPU_NUMBERS):
            device = value
    if type(device) in _GPU_NUMBERS:
        device = GPU
    copies = bool(named.get("copy", False))
    return (None if device is None else torch.device(device)), dtype, copies


def _passes_gradient(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_meta
        and value.requires_grad
        and torch.is_grad_enabled()
    )


def _as_index(index: Any) -> Any:
    """An index with tensors in place of arrays and lists of numbers."""
    if isinstance(index, tuple):
        return tuple(map(_as_index, index))
    if isinstance(index, list) and all(isinstance(each, int | np.generic) for each in index):
        index = np.array(index, None if index else np.int64)
    is_whole = isinstance(index, np.ndarray) and index.dtype.kind in "biu"
    return torch.tensor(index) if is_whole else index


def _fixed(args: Arguments) -> list[Any]:
    """Arguments with sizes as they are now, which a script may change in its list."""
    return [tuple(each) if type(each) is list else each for each in args]


def keeps_numbers(tensor: Tensor) -> bool:
    """Whether a tensor keeps its values on the GPU: small whole numbers do."""
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
    return is_plain and keeps_values(tensor)


def _is_constant(func: Function, args: Arguments, made: Tensor) -> bool:
    """Whether a tensor is made of numbers, such as a learning rate or steps of time, which code
    compares."""
    is_number = bool(args) and type(args[0]) in (int, float)
    is_fixed = not made.requires_grad and is_small(made)
    return is_number and is_fixed and func in (torch.tensor, torch.arange, torch.linspace)


def stands_for_gpu(device: object) -> bool:
    """Whether a device that code names is the GPU, or the meta device that stands for it."""
    return type(device) is int or device_named(device).type in ("cuda", "meta")


def called_from(folder: str, *excepted: str) -> bool:
    """Whether the code that calls PyTorch here is in ``folder``, and not in one that is excepted."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return False
    file = frame.f_code.co_filename
    return file.startswith(folder) and not (excepted and file.startswith(excepted))


def _name_of(func: Function) -> str:
    return str(resolve_name(func) or getattr(func, "__name__", func)).removeprefix("torch.")
