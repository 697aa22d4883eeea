"""Runs PyTorch code without large allocations: large tensors are meta tensors, small constants stay
real.

Building under ``torch.device("meta")`` alone breaks models that name a device, or that read a value
while they are built, such as ``[x.item() for x in torch.linspace(0, rate, depth)]``.  Here a tensor
is a meta tensor if it was computed from one, or if it has more than :data:`REAL_ELEMENTS` elements
(:data:`REAL_WHOLE_ELEMENTS` for integers: models read positions and masks).  All other tensors are
real, on the CPU.  Requests for a device are ignored.  An operator on real and meta tensors runs on
the meta device.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial, wraps
from typing import Any, Final
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, resolve_name

from gpumemnet.extract.host_numbers import HostNumbers
from gpumemnet.extract.known_layouts import (
    KnownLayouts,
    argument_tensors,
    as_meta,
    written_arguments,
)
from gpumemnet.extract.sparse_tensors import result_on_meta
from gpumemnet.sandbox.user_code import UnknownValueError, running_line
from gpumemnet.torch_private.names import (
    Arguments,
    DispatchMode,
    Function,
    Keywords,
    aten,
    id_of_storage,
    is_sparse,
    python_function,
    replaced,
    schema,
    seen_within_operators,
    storage_id,
    tree_map_only,
    value_of,
    without_function_modes,
)
from gpumemnet.torch_private.training import AUTOCAST_BY_DEVICE

REAL_ELEMENTS: Final = 2**14
"""Largest number of elements of a real tensor: above usual tables of constants, below usual
weights."""
REAL_WHOLE_ELEMENTS: Final = 2**23
"""The same for integers and booleans: above the classes of all pixels of a batch."""
_COMPUTED_ELEMENTS: Final = 2**24
"""The same for those that are computed from known ones: a mask of pixels or boxes, repeated for each
class, selects as many as the mask itself does."""

_Tensor = torch.Tensor
_META: Final = torch.device("meta")
_READS_DEVICE: Final = _Tensor.device.__get__
_STAYS: Final = frozenset({_Tensor.cuda, _Tensor.cpu, _Tensor.pin_memory})
_READS_VALUE: Final = frozenset(
    {
        *(_Tensor.item, _Tensor.tolist, _Tensor.numpy, _Tensor.__array__, _Tensor.__contains__),
        *(
            _Tensor.__bool__,
            _Tensor.__int__,
            _Tensor.__float__,
            _Tensor.__index__,
            _Tensor.__complex__,
        ),
    }
)
NEEDS_VALUES: Final = "needs the values of a tensor, and here no values are computed"
_NO_SHAPE: Final = "has an output whose shape depends on values, and here no values are computed"
_NO_KERNEL: Final = (
    "does not say what its output is like: register that with torch.library.register_fake"
)
READS_VALUE_BELOW: Final = frozenset(
    {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal", "aten::allclose"}
)
"""Operators that return a value of a tensor."""


OnGpu = Callable[[torch.Tensor, str], None]
"""Called with a tensor that arrives on the GPU, and the operator that moves it."""

CONSTANTS: Final = frozenset({torch.arange, torch.linspace, torch.tensor, torch.as_tensor})
"""Functions with known values: code requests them on the device of its input and then reads
them."""
FILLED: Final = frozenset({torch.ones, torch.full, torch.zeros})
"""Functions whose values are known, too.  Only ones and whole numbers keep them: those are masks,
other zeros are buffers."""
_PLACED: Final = {aten.index_put, aten.index_put_, aten.scatter, aten.scatter_, aten.index_fill_}
"""Operators that write to places: those of a dimension, or one list of them for each."""
_PACK: Final = aten._pack_padded_sequence.default


_FEW: Final = 8
"""Largest number of elements of a parameter that is read as it was before training."""


def is_small(tensor: torch.Tensor) -> bool:
    """Whether a tensor that exists before the code runs keeps its values."""
    is_whole = not (tensor.is_floating_point() or tensor.is_complex())
    return tensor.numel() <= (REAL_WHOLE_ELEMENTS if is_whole else REAL_ELEMENTS)


class MissingValues:
    """Decides what happens where code needs values that were not computed: this class refuses;
    others may guess."""

    def __init__(self) -> None:
        self._notes: dict[tuple[str, str], str] = {}
        self._scalars_are_factors = False

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[object]:
        """Context of an optimizer's step: PyTorch's own optimizers read scalars only to scale
        updates, so any value will do."""
        is_own = (type(optimizer).__module__ + ".").startswith("torch.optim.")
        return patch.object(self, "_scalars_are_factors", is_own)

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each operator and line."""
        return tuple(self._notes.values())

    def value(self, function: str, tensor: torch.Tensor) -> Any:
        """Return what code gets that reads the values of ``tensor`` with ``function``.

        Raises:
            UnknownValueError: names the function, unless any value will do.
        """
        if self._scalars_are_factors and function.rpartition(".")[2] == "item":
            return one(tensor.dtype)
        raise UnknownValueError(function, NEEDS_VALUES)

    def result(
        self, operator: Any, args: Arguments, kwargs: Keywords, error: UnknownValueError
    ) -> Any:
        """Return the result of ``operator``, whose output on meta tensors is unknown.

        Raises:
            UnknownValueError: ``error``, which names the operator.
        """
        raise error

    def assumed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real tensor gives the values of one on the GPU; return it."""
        return tensor

    def picked(self, operator: Any, args: Arguments, result: Any) -> Any:
        """Return the result of an operator on meta tensors, in which numbers of what it picks may
        be real."""
        return result

    def copied_to_host(self, function: str) -> None:
        """Note that ``function`` has requested a copy on the CPU, and got the same tensor."""
        self._note(
            function,
            "copies a tensor to the host; results computed from the copy are counted as if they were on the GPU",
        )

    def _note(self, operator: str, what: str) -> str:
        where = running_line()
        self._notes.setdefault(
            (operator, where), f"{operator}{f' at {where},' if where else ''} {what}."
        )
        return where


def one(dtype: torch.dtype) -> bool | int | float | complex:
    """Return 1 as a number of this type."""
    if dtype == torch.bool:
        return True
    return 1 + 0j if dtype.is_complex else 1.0 if dtype.is_floating_point else 1


def large_tensors_on_meta() -> AbstractContextManager[object]:
    """Context in which a model is built without memory for its weights, to be traced.

    Tensors of more than :data:`REAL_ELEMENTS` elements are on the meta device (whole numbers:
    :data:`REAL_WHOLE_ELEMENTS`). Smaller ones are real, because models read them while they are
    built.

    Example:
        >>> import gpumemnet, torch
        >>> with gpumemnet.large_tensors_on_meta():
        ...     model = torch.nn.Linear(100_000, 100_000)
        >>> gpumemnet.trace(model, torch.empty(1, 100_000, device="meta")).parts["parameter"]
        40000400000
    """
    return placement()


def placement(
    missing_values: MissingValues | None = None,
    on_gpu: OnGpu | None = None,
    holds: Callable[[torch.Tensor], bool] | None = None,
) -> AbstractContextManager[object]:
    """Context in which PyTorch code runs with large tensors on meta.

    Args:
        missing_values: what happens where an operator needs values that were not computed; by
            default :class:`UnknownValueError`, which names the operator.
        on_gpu: called with every tensor that the code requests on a device other than the CPU, and
            the operator.
        holds: whether a real tensor stands for one on the GPU; the code then sees another device
            than the CPU.
    """
    stack = ExitStack()
    stack.enter_context(launches_do_nothing())
    values = KnownValues(missing_values or MissingValues())
    stack.enter_context(values)
    mode = _DeviceBlind(values, missing_values or MissingValues(), on_gpu, holds)
    stack.enter_context(mode)
    stack.enter_context(seen_within_operators(mode))
    stack.enter_context(
        replaced([(name, _cuda_for_meta(value_of(name))) for name in AUTOCAST_BY_DEVICE])
    )
    return stack


def _cuda_for_meta(function: Function) -> Function:
    """Return ``function`` of autocast, for code that asks for ``tensor.device.type``: the meta
    device has no autocast."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: "cuda" if value == "meta" else value for name, value in kwargs.items()}
        return function(
            *("cuda" if isinstance(value, str) and value == "meta" else value for value in args),
            **kwargs,
        )

    return run


class KnownValues(DispatchMode):
    """Decides for every operator whether it runs on real or on meta tensors.

    Args:
        missing_values: what happens where an operator needs values that were not computed.
        limited: whether the limits of real tensors hold for the results of one; they hold for all
            by default.
    """

    def __init__(
        self,
        missing_values: MissingValues,
        limited: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        super().__init__()
        self._missing_values = missing_values
        self._limited = limited
        self._layouts = KnownLayouts()
        self._overwritten: MutableMapping[int, torch.UntypedStorage] = WeakValueDictionary()
        """Real storages that a meta tensor was written into: their values are unknown."""
        self.numbers = HostNumbers(self.unknown, missing_values.assumed)

    def unknown(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's values are unknown."""
        return tensor.is_meta or bool(self._overwritten and storage_id(tensor) in self._overwritten)

    def run(self, func: Any, args: Arguments, named: Keywords) -> Any:
        """Run an operator where it belongs."""
        with without_function_modes():  # in a backward pass, kernels of PyTorch that are Python
            return self._placed(func, args, named)

    def _placed(self, func: Any, args: Arguments, named: Keywords) -> Any:
        tensors = argument_tensors(args, named)
        if self.numbers.makes_up and not tensors and is_meta(named.get("device")):
            made = func(*args, **named)
            self.numbers.compute(func, args, named, made)
            return made
        is_unknown = any(map(self.unknown, tensors))
        is_view = func.is_view or torch.Tag.inplace_view in func.tags
        if is_unknown and is_view and not any(each.is_meta for each in tensors):
            made = func(*args, **named)
            if {*map(storage_id, argument_tensors([made], {}))} <= {*map(storage_id, tensors)}:
                return made  # in inference mode, some of these operators copy
        if is_unknown:
            result = (
                result_on_meta(func, args, named)
                if any(map(is_sparse, tensors))
                else NotImplemented
            )
            return (
                self._run_on_meta(func, tensors, args, named)
                if result is NotImplemented
                else result
            )
        if any(argument.alias_info is not None for argument in schema(func).arguments):
            return func(*args, **named)  # views and in-place operators allocate nothing
        if self._limited is not None and not any(map(self._limited, tensors)):
            return func(*args, **named)
        return self._run_small(func, args, named)

    def _run_small(self, func: Any, args: Arguments, named: Keywords) -> Any:
        """Run an operator on real tensors, unless its result is large, or the host lacks the kernel
        that the GPU has."""
        try:
            trial = self._layouts.call(func, args, named)
        except RuntimeError:  # the operator needs values, which are known
            return func(*args, **named)
        made = argument_tensors([trial], {})
        whole = sum(
            leaf.numel() for leaf in made if not (leaf.is_floating_point() or leaf.is_complex())
        )
        others = sum(leaf.numel() for leaf in made) - whole
        if others > REAL_ELEMENTS or whole > _COMPUTED_ELEMENTS:
            if self.numbers.makes_up or (  # its numbers follow from known ones alone
                type(trial) is torch.Tensor
                and named.get("device") is None
                and torch.Tag.nondeterministic_seeded not in func.tags
            ):
                self.numbers.compute(func, args, named, trial)
            return trial
        try:
            return func(*args, **named)
        except NotImplementedError:  # the host lacks the kernel; the shape is known all the same
            return trial

    def _run_on_meta(
        self,
        func: Any,
        tensors: list[torch.Tensor],
        args: Arguments,
        kwargs: Keywords,
    ) -> Any:
        is_dynamic = torch.Tag.dynamic_output_shape in func.tags
        is_read = schema(func).name in READS_VALUE_BELOW
        known = None
        if (out := kwargs.get("out")) is not None and is_dynamic:
            found = self._run_on_meta(func.overloadpacket.default, tensors, args, {})
            self.numbers.forget(out)
            out.resize_(found.shape).zero_()
            return out if found.is_meta else out.copy_(found)
        if is_read or is_dynamic:
            known = self.numbers.arguments(func, tensors, args, kwargs)
        if is_read:
            return self._missing_values.result(
                func,
                known[0] if known else args,
                kwargs,
                UnknownValueError(_dotted_name(func), NEEDS_VALUES),
            )
        if known and is_dynamic:
            found = func(*known[0], **known[1])
            is_drawn = any(map(self.numbers.is_drawn, tensors))
            return tree_map_only(
                torch.Tensor, partial(self.numbers.stand_in, is_drawn=is_drawn), found
            )
        if func is _PACK:
            return self._packed(args, kwargs)
        if func is aten.masked_select.default and self.numbers.of_mask(args[1]) is not None:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
            func, args = aten.index.Tensor, (args[0].expand(shape), [args[1].expand(shape)])
        if func is aten.index.Tensor:
            args = self._with_known_selection(args)
        try:
            result = self._layouts.call(func, args, kwargs)
        except RuntimeError as error:
            is_foreign = func.namespace != "aten"
            has_no_shape = is_dynamic or (is_foreign and "data-dependent shape" in str(error))
            has_no_kernel = isinstance(error, NotImplementedError) or (
                is_foreign and "fake impl" in str(error)
            )
            if not (has_no_shape or has_no_kernel):
                raise
            reason = _NO_SHAPE if has_no_shape else _NO_KERNEL
            try:
                return self._missing_values.result(
                    func, args, kwargs, UnknownValueError(_dotted_name(func), reason)
                )
            except UnknownValueError as unknown:
                unknown.__traceback__ = None  # its frames hold it, and what the operator was given
                result = NotImplemented if is_foreign else result_on_meta(func, args, kwargs)
                if is_foreign and (python := python_function(func)) is not None:
                    with suppress(Exception):  # of any kind, where it needs more than shapes
                        result = python(*args, **kwargs)
                if has_no_shape or result is NotImplemented:
                    raise
                return result
        writes = written_arguments(func)
        if func.overloadpacket in _PLACED and not self.numbers.follows(tensors):
            args = self._with_drawn_places(args)
            tensors = argument_tensors(args, kwargs)
        follows = self.numbers.makes_up or self.numbers.follows(tensors)
        written = _written(writes, args, kwargs)
        is_real = follows and self.numbers.compute(func, args, kwargs, result, written)
        for value in written:
            # A few numbers that are learned stay near the first ones, unless they are set.
            is_few = isinstance(value, torch.nn.Parameter) and value.numel() <= _FEW
            is_learned = is_few and "copy" not in func.__name__
            if value.is_meta and not (follows or is_learned):
                self.numbers.forget(value)
            if not (value.is_meta or is_real):
                storage = value.untyped_storage()
                self._overwritten[id_of_storage(storage)] = storage
        if written and isinstance(result, torch.Tensor) and schema(func).returns[0].alias_info:
            return written[0]
        return self._missing_values.picked(func, args, result)

    def _packed(self, args: Arguments, kwargs: Keywords) -> Any:
        """Pack a sequence by the lengths of its samples, which PyTorch keeps on the host."""
        lengths = args[1]
        if self.unknown(lengths) or not bool((lengths > 0).all()):
            error = UnknownValueError(
                "pack_padded_sequence",
                "needs the lengths of the samples, and here no values are computed",
            )
            return self._missing_values.result(_PACK, args, kwargs, error)
        return _PACK(as_meta(args[0]), *args[1:], **kwargs)

    def _with_drawn_places(self, args: Arguments) -> Arguments:
        """Draw the places that are written to, where only their number is known: it tells how many a
        mask will select."""

        def drawn(places: torch.Tensor | None, size: int) -> torch.Tensor | None:
            if places is None or places.dtype != torch.long or self.numbers.follows([places]):
                return places
            count, shape = places.numel(), places.shape
            made = torch.empty_like(places, device="meta")
            self.numbers.draw(
                made, lambda: (torch.randperm(max(size, count)) % size)[:count].view(shape)
            )
            return made

        target, at = args[:2]
        if not target.numel():
            return args
        if isinstance(at, int):
            return (*args[:2], drawn(args[2], target.shape[at]), *args[3:])
        if any(each is not None and each.dtype != torch.long for each in at):
            return args  # a mask is of several dimensions
        return (target, [*map(drawn, at, target.shape)], *args[2:])

    def _with_known_selection(self, args: Arguments) -> Arguments:
        """Put the numbers of the selected elements in place of masks whose values are known, as
        PyTorch does."""
        indices: list[Any] = []
        for index in args[1]:
            is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
            known = self.numbers.of_mask(index) if is_mask else None
            indices += [index] if known is None else known.nonzero().unbind(1)
        return (args[0], indices, *args[2:])


def _written(
    writes: tuple[tuple[int, str], ...], args: Arguments, kwargs: Keywords
) -> list[torch.Tensor]:
    """Return the tensors that an operator wrote into."""
    values = [args[index] if index < len(args) else kwargs.get(name) for index, name in writes]
    return argument_tensors(values, {})


def _dotted_name(func: Any) -> str:
    return str(schema(func).name).replace("::", ".")


class _DeviceBlind(TorchFunctionMode):
    """Ignores every device that the code requests, and names the operator that needs an unknown
    value."""

    def __init__(
        self,
        values: KnownValues,
        missing_values: MissingValues,
        on_gpu: OnGpu | None,
        holds: Callable[[torch.Tensor], bool] | None,
    ) -> None:
        super().__init__()
        self._holds = holds
        self._values = values
        self._missing_values = missing_values
        self._on_gpu = on_gpu

    def __torch_function__(
        self,
        func: Function,
        types: Sequence[type],
        args: Arguments = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func in _STAYS:
            if func is _Tensor.cpu and args[0].is_meta:
                self._missing_values.copied_to_host(_name_of(func))
            self._tell(func, args[0], func is _Tensor.cuda)
            return args[0]
        if (
            self._holds is not None
            and func == _READS_DEVICE
            and not args[0].is_meta
            and self._holds(args[0])
        ):
            return _META
        device = named.get("device")
        if func in _READS_VALUE and self._values.unknown(args[0]):
            return self._missing_values.value(_name_of(func), args[0])
        if func is _Tensor.to:
            device = _device_in(args[1:], named)
            given = (*args[1:], named.get("device"))
            places = [torch.device(each) for each in given if isinstance(each, str | torch.device)]
            if args[0].is_meta and any(each.type == "cpu" for each in places):
                self._missing_values.copied_to_host(_name_of(func))
            args = (args[0], *map(_without_device, args[1:]))
            named.pop("device", None)
        if "device" in named and (not is_meta(named["device"]) or _has_known_values(func, named)):
            named["device"] = None
        if named.get("pin_memory"):
            named["pin_memory"] = False
        try:
            result = func(*args, **named)
        except UnknownValueError as error:
            raise UnknownValueError(_name_of(func), error.reason) from None
        self._tell(func, result, device is not None and torch.device(device).type != "cpu")
        return result

    def _tell(self, func: Function, result: object, goes_to_gpu: bool) -> None:
        if goes_to_gpu and self._on_gpu is not None and isinstance(result, _Tensor):
            self._on_gpu(result, _name_of(func))


def _name_of(func: Function) -> str:
    return (
        str(resolve_name(func) or getattr(func, "__name__", func))
        .removeprefix("torch.")
        .removesuffix(".default")
    )


def is_meta(device: object) -> bool:
    """Whether ``device``, as code may name one, is the meta device."""
    return (
        device is not None and not isinstance(device, int) and device_named(device).type == "meta"
    )


def device_named(device: object) -> torch.device:
    """The device that code names: by a text, which may be a member of an enumeration, or as a device."""
    return torch.device(device if isinstance(device, str) else str(device))


def _has_known_values(func: Function, named: Mapping[str, Any]) -> bool:
    """Whether the values of what ``func`` makes are known, and code may read them."""
    if func not in FILLED:
        return func in CONSTANTS
    if named.get("device") == "meta":  # written so by PyTorch itself: it wants no values
        return False
    dtype = named.get("dtype")
    if dtype in (int, bool):
        return True
    return func is torch.ones or (
        isinstance(dtype, torch.dtype) and not (dtype.is_floating_point or dtype.is_complex)
    )


def _device_in(args: Arguments, named: Mapping[str, Any]) -> Any:
    """The device that a call of ``Tensor.to`` names: itself, or another tensor's."""
    for value in (*args[:1], named.get("device")):
        if isinstance(value, torch.Tensor):
            return value.device
        if _is_device(value):
            return value
    return None


def _without_device(value: object) -> object:
    """An argument of ``Tensor.to``, with ``None`` for a device and a dtype for another tensor."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    return None if _is_device(value) else value


def _is_device(value: object) -> bool:
    return isinstance(value, str | torch.device) or type(value) is int


@contextmanager
def launches_do_nothing(*, before_import: bool = False) -> Iterator[None]:
    """Context in which ``kernel[grid](…)`` does nothing.

    Args:
        before_import: whether code in the context may import Triton first; else it has no effect if
            Triton is not imported.
    """
    if before_import and importlib.util.find_spec("triton") is not None:
        importlib.import_module("triton.runtime.jit")
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        yield
        return
    original = jit.KernelInterface.__getitem__

    def launch(kernel: object, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    jit.KernelInterface.__getitem__ = launch
    try:
        yield
    finally:
        jit.KernelInterface.__getitem__ = original
