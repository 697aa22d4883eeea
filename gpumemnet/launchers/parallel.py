"""A training job on several GPUs, traced on one of them: ``DistributedDataParallel`` and
``fully_shard`` run on meta tensors in a simulated process group.

The process is the first rank, and every collective finishes at once.  The group is PyTorch's own
fake group (``torch/testing/_internal/distributed/fake_pg.py``), which does not support meta
tensors.  Therefore collectives are answered before they reach it.

``DistributedDataParallel``: each rank holds all of the model, and gradients are summed in buckets.
Its reducer is C++ (``torch/csrc/distributed/c10d/reducer.cpp``).  It allocates buckets on the
parameters' device, so they are meta tensors here (Li et al., arXiv 2006.15704).

``fully_shard``: parameters, gradients and optimizer state are split among the ranks.  Each block of
the model's stacks is a group whose parameters are gathered and freed together; the other parameters
are the outermost group.  PyTorch's documentation and trainers do the same
(``torch/distributed/fsdp/_fully_shard``; Zhao et al., arXiv 2304.11277; the stages are those of
ZeRO, Rajbhandari et al., arXiv 1910.02054).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ContextDecorator, contextmanager, nullcontext, suppress
from typing import Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpumemnet.errors import ExtractError
from gpumemnet.extract.checkpointing import blocks
from gpumemnet.extract.known_layouts import argument_tensors
from gpumemnet.launchers import names
from gpumemnet.launchers.names import (
    NEW_GROUP,
    OBJECT_COLLECTIVES,
    fake_store,
    finished_work,
    is_sharded,
    resolve_process_group,
)
from gpumemnet.torch_private.engine import backward_runs
from gpumemnet.torch_private.names import (
    OWN_DICTS,
    STORAGE_RESIZE,
    DispatchMode,
    own_parameters,
    replaced,
    schema,
    tree_leaves,
    value_of,
)

_BEGIN, _END = dist.init_process_group, dist.destroy_process_group
"""PyTorch's own functions: a traced script finds replacements."""


Exchanged = Callable[[str, int], None]
"""Called for each collective with the name of its process group and its number of ranks."""
Sends = Callable[[Sequence[int]], None]
"""Called with the ranks of a group in which one sends to another."""
ViewStreams = dict[torch.Size, Any]
"""Shape of views of a flat parameter → the stream that they were made on."""
_META: Final = torch.device("meta")
_POINT_TO_POINT: Final = frozenset({"send", "recv_"})


@contextmanager
def process_group(
    ranks: int, exchanged: Exchanged, rank: int = 0, sends: Sends = lambda ranks: None
) -> Iterator[ViewStreams]:
    """Context in which this process is one of ``ranks``.

    Args:
        ranks: number of ranks.
        exchanged: called for each collective.
        rank: of this process.
        sends: called where ranks send tensors to each other.

    Yields:
        what :func:`sharding_on_meta` tells it.

    Raises:
        ExtractError: the process is part of a group already.
    """
    if dist.is_initialized():
        raise ExtractError(
            "this process is in a process group (torch.distributed.init_process_group); trace in another process"
        )
    _BEGIN("fake", rank=rank, world_size=ranks, store=fake_store())
    try:
        replacements = [
            (name, _OBJECTS[collective])
            for collective, names in OBJECT_COLLECTIVES.items()
            for name in names
        ]
        groups = [(name, _simulated(value_of(name))) for name in NEW_GROUP]
        gathered: ViewStreams = {}
        with replaced([*replacements, *groups]), _Collectives(exchanged, sends, gathered):
            yield gathered
    finally:
        _END()


def _simulated(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return what replaces ``new_group``: it makes a fake group, whatever backend it is asked for."""

    def new_group(
        ranks: list[int] | None = None,
        timeout: object = None,
        backend: object = None,
        pg_options: object = None,
        *args: object,
        **kwargs: object,
    ) -> Any:
        return make(ranks, None, "fake", None, *args, **kwargs)

    return new_group


def _all_gather_object(object_list: list[Any], obj: Any, *args: object, **kwargs: object) -> None:
    object_list[:] = [obj] * len(object_list)


def _gather_object(
    obj: Any, object_gather_list: list[Any] | None = None, *args: object, **kwargs: object
) -> None:
    if object_gather_list is not None:
        _all_gather_object(object_gather_list, obj)


def _scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    *args: object,
    **kwargs: object,
) -> None:
    scatter_object_output_list[:1] = (scatter_object_input_list or [None])[:1]


def _broadcast_object_list(object_list: list[Any], *args: object, **kwargs: object) -> None:
    pass


_OBJECTS: Final = {
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "scatter_object_list": _scatter_object_list,
    "broadcast_object_list": _broadcast_object_list,
}
"""Collectives for Python objects, which need values of tensors: all ranks have the objects of this
one."""


class _Collectives(DispatchMode):
    """Answers collectives at once, and lets sharded tensors decompose their operators before other
    modes see them."""

    def __init__(self, exchanged: Exchanged, sends: Sends, gathered: ViewStreams) -> None:
        super().__init__()
        self._exchanged, self._sends, self._gathered = exchanged, sends, gathered

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "c10d" in func.namespace:
            group = _group_of(args)
            if group is not None:
                self._exchanged(group.group_name, group.size())
                if func.__name__.partition(".")[0] in _POINT_TO_POINT:
                    self._sends(dist.get_process_group_ranks(group))
            if func.namespace == "c10d":
                return _finished(func, args)
        if any(is_sharded(type(each)) for each in argument_tensors(args, kwargs)):
            return NotImplemented
        device = kwargs.get("device")
        if device is not None and device.type == "cuda":  # DTensor's code names it
            kwargs["device"] = args[0].device if isinstance(args[0], Tensor) else _META
        if func is torch.ops.aten.add.Tensor and self._gathered and backward_runs():
            with self._gathered.get(args[0].shape, nullcontext()):  # autograd adds both uses there
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _group_of(args: tuple[Any, ...]) -> dist.ProcessGroup | None:
    """Return the process group among the arguments of a collective; functional collectives have its
    name there."""
    for argument in args:
        if isinstance(argument, torch.ScriptObject | str):
            with suppress(RuntimeError):  # it is not a process group
                if isinstance(argument, str):
                    return cast(dist.ProcessGroup, resolve_process_group(argument))
                return dist.ProcessGroup.unbox(argument)
    return None


def _finished(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the result of a collective: the tensors that it writes into, if its schema says so,
    and finished work; a monitored barrier has none."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    written = args[0] if args else None
    for each in tree_leaves(args[:1]):  # all ranks send the numbers of this one
        given = next(iter(tree_leaves(args[1:2])), None)
        if isinstance(given, Tensor) and given.numel() and not (each.is_meta or given.is_meta):
            numbers = torch.arange(each.numel()) % given.numel()
            each.copy_(given.flatten()[numbers].view_as(each))
    future.set_result(written if isinstance(written, list) else [written])
    work = finished_work(future)
    return (None, work, (written, work))[len(schema(func).returns)]


class Recorder(Protocol):
    """Records what is on the simulated GPU."""

    def communicating(self) -> ContextDecorator:
        """Context, and decorator of functions, that communicate with other ranks: what they
        allocate on the meta device is on the GPU too."""

    def absent(self) -> ContextDecorator:
        """Context, and decorator of functions, whose tensors are on no device."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record that ``storage`` was freed or allocated again."""


class RankRecorder(Recorder, Protocol):
    """Records all that is on the simulated GPU of a rank."""

    def arrived(self, tensor: Tensor, memory_class: str, module: str) -> None:
        """Record a tensor that has arrived there."""

    def classify(self, tensors: Iterable[Tensor], memory_class: str, module: str) -> None:
        """Set class and module of tensors."""

    def exchanged(self, group: str, ranks: int) -> None:
        """Record that the ranks of a group communicate."""

    def set_ranks(self, ranks: int) -> None:
        """Note how many ranks there are."""


class Streams(Protocol):
    """The streams of the simulated GPU."""

    def current_stream(self) -> Any:
        """The stream that is entered."""


@contextmanager
def replicas_on_meta(recorder: Recorder) -> Iterator[None]:
    """Context in which ``DistributedDataParallel`` works on meta tensors.

    Args:
        recorder: records what is allocated to communicate: buckets, which are rebuilt before the
            second forward pass, and buffers for sending parameters at first and module buffers
            before each pass.
    """
    communicating = recorder.communicating()
    init: Callable[..., None] = value_of(names.DDP_INIT)

    @communicating
    def made(
        self: object,
        module: object,
        device_ids: object = None,
        output_device: object = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        init(self, module, None, None, *args, **kwargs)  # there is only the meta device here

    replacements = (
        (names.DDP_INIT, made),
        (names.DDP_PRE_FORWARD, communicating(value_of(names.DDP_PRE_FORWARD))),
        # A synchronized batch norm keeps what a batch norm keeps, and statistics of a few numbers
        # per channel.
        (names.SYNC_BATCH_NORM, nn.BatchNorm2d.forward),
        (names.VERIFY_SHAPES, lambda *args, **kwargs: None),
    )
    with replaced(replacements):
        yield


Arrived = Callable[[Tensor, bool], None]
"""Called for each unsharded tensor that arrives on the GPU, and whether it is a parameter."""


def resizing(recorder: Recorder) -> tuple[str, Callable[..., torch.UntypedStorage]]:
    """Return what is replaced, and by what, so that storages are recorded that are freed early."""
    resize: Callable[..., torch.UntypedStorage] = value_of(STORAGE_RESIZE)

    def resized(storage: torch.UntypedStorage, size_bytes: int) -> torch.UntypedStorage:
        resize(storage, size_bytes)
        recorder.resized(storage)
        return storage

    return STORAGE_RESIZE, resized


@contextmanager
def sharding_on_meta(
    recorder: Recorder, streams: Streams, arrived: Arrived, gathered: ViewStreams
) -> Iterator[None]:
    """Context in which ``fully_shard`` and its hooks work on meta tensors.

    Args:
        recorder: records communication, and parameters that are freed early.
        streams: streams of the simulated GPU.
        arrived: called for each unsharded tensor that arrives on the GPU.
        gathered: is told of views of flat parameters.
    """
    communicating = recorder.communicating()

    def move(parameters: list[nn.Parameter], buffers: list[Tensor], device: torch.device) -> None:
        for parameter in parameters:
            arrived(parameter, True)
        for buffer in buffers:
            arrived(buffer, False)

    replacements = (
        (names.DEVICE_MODULE, streams),
        (names.ACCELERATOR_STREAM, streams.current_stream),
        resizing(recorder),
        (names.RNG_SUPPORT, lambda mesh: False),
        (names.MESH_DEVICE, lambda mesh: _META),
        (names.MOVE_STATES, move),
        (names.NO_META_CHECK, lambda self: None),
        (names.OFFLOAD_CHECK, lambda self: None),
        (names.SHARDED_SHAPES, recorder.absent()(value_of(names.SHARDED_SHAPES))),
        (names.SHARD_PARAMETER, _offloading(value_of(names.SHARD_PARAMETER))),
        *(
            (method, communicating(value_of(method)))
            for method in (*names.COMMUNICATING_METHODS, *names.FSDP1_COMMUNICATING)
        ),
        *(
            (views, _joined_on_stream(value_of(views), streams, gathered))
            for views in names.FSDP1_VIEWS
        ),
    )
    with replaced(replacements):
        yield


def _joined_on_stream(
    views_of: Callable[..., Iterable[Tensor]], streams: Streams, gathered: ViewStreams
) -> Callable[..., list[Tensor]]:
    """Return what makes the views of a flat parameter, whose gradients are joined on the stream that
    the views were made on, as autograd does on a GPU."""

    def views(*args: Any, **kwargs: Any) -> list[Tensor]:
        made, stream = list(views_of(*args, **kwargs)), streams.current_stream()
        gathered.update((view.shape, stream) for view in made)

        def enter(gradients: object) -> None:
            stream.__enter__()

        def leave(*gradients: object) -> None:
            stream.__exit__(None, None, None)

        nodes: set[Any] = {view.grad_fn.next_functions[0][0] for view in made if view.grad_fn}
        for node in nodes:
            node.register_prehook(enter)
            node.register_hook(leave)
        return made

    return views


def _offloading(shard: Callable[..., None]) -> Callable[..., None]:
    """Return what shards a parameter of ``fully_shard``: an offloaded shard leaves the GPU, which
    PyTorch's own code does not let meta tensors do, and comes back to be gathered."""

    def sharded(parameter: Any, *args: Any, **kwargs: Any) -> None:
        shard(parameter, *args, **kwargs)
        if parameter.offload_to_cpu:
            parameter.device = torch.device("cuda")
            data = parameter._sharded_param_data.cpu()
            parameter._sharded_param_data = data = (
                data.pin_memory() if parameter.pin_memory else data
            )
            local = parameter.sharded_param._local_tensor
            parameter.sharded_param._local_tensor = data.as_strided(local.shape, local.stride())

    return sharded


@contextmanager
def sharded(
    model: nn.Module, ranks: int, dtype: torch.dtype | None, reshard: bool
) -> Iterator[int]:
    """Context in which ``model`` is sharded; it is left as it was.

    Args:
        model: the model, with meta tensors in place.
        ranks: number of ranks.
        dtype: type of gathered parameters and of the forward and backward pass; ``None`` for the
            parameters' own type.  With a type, gradients are summed in fp32.
        reshard: whether gathered parameters are freed after the forward pass (ZeRO-3), or kept for
            the backward pass (ZeRO-2).

    Yields:
        the number of groups that are gathered as a whole.

    Raises:
        ExtractError: names a parameter that cannot be sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    policy = (
        MixedPrecisionPolicy()
        if dtype is None
        else MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    )
    stack = blocks(model)
    _check(model, stack)
    groups = (*stack, model)
    with _restored(model):
        for each in groups:
            whole = [
                parameter.untyped_storage()
                for parameter in each.parameters()
                if not is_sharded(type(parameter))
            ]
            fully_shard(
                each, mesh=mesh, mp_policy=policy, reshard_after_forward=None if reshard else False
            )
            for storage in whole:
                storage.resize_(0)  # only the table of meta tensors still refers to it
        yield len(groups)


def _check(model: nn.Module, stack: list[nn.Module]) -> None:
    """Check that each parameter can be sharded.

    Raises:
        ExtractError: names a parameter that cannot be sharded.
    """
    owners: dict[int, set[int]] = {}
    for number, block in enumerate(stack):
        for parameter in block.parameters():
            owners.setdefault(id(parameter), set()).add(number)
    inside = {id(module) for block in stack for module in block.modules()}
    for module in model.modules():
        if id(module) not in inside:
            for own in own_parameters(module).values():
                owners.setdefault(id(own), set()).add(len(stack))
    for name, parameter in model.named_parameters():
        reason = None
        if len(owners[id(parameter)]) > 1:
            reason = "is shared by blocks that are gathered one by one"
        elif parameter.dim() == 0:
            reason = "is a single number"
        elif not parameter.is_contiguous():
            reason = "is not contiguous, as with channels_last"
        if reason:
            raise ExtractError(
                f"the parameter '{name}' {reason}, which fully_shard does not support"
            )


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Context that restores classes, tensors and hooks of the modules of ``model`` on exit."""
    before = [
        (module, type(module), dict(module.__dict__), _tables(module)) for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, kind, attributes, tables in before:
            module.__class__ = kind
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for table, contents in tables:
                table.clear()
                table.update(contents)
            names.forget_sharding(module)


def _tables(module: nn.Module) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """Return the dicts of a module that registering a parameter or a hook changes, with copies of
    them."""
    return [(table, dict(table)) for name, table in module.__dict__.items() if name in OWN_DICTS]
