"""Presents the simulated GPU to a script: ``torch.cuda`` answers for it, modules move to it, and what
is saved and loaded finds its device.

What a script requests there is allocated by :mod:`gpumemnet.tracing.script.gpu`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpumemnet.tracing.script.observer import ScriptObserver

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gpumemnet.extract.host_numbers import HostNumbers
from gpumemnet.extract.module_calls import map_tensors
from gpumemnet.extract.placement import is_meta, is_small
from gpumemnet.launchers import deepspeed_engine, host_memory, libraries
from gpumemnet.launchers.parallel import resizing
from gpumemnet.physics.element_types import IMAGE_DIMENSIONS
from gpumemnet.torch_private import script as names
from gpumemnet.torch_private.names import (
    id_of_storage,
    is_sparse,
    own_buffers,
    own_parameters,
    replaced,
    value_of,
    without_function_modes,
)
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.tracing.script.compiled import Compiler
from gpumemnet.tracing.script.gpu import (
    GpuRequests,
    called_from,
    keeps_numbers,
    parse_target,
    stands_for_gpu,
)
from gpumemnet.tracing.script.libraries import preparations, prepared
from gpumemnet.tracing.script.read_values import ReadValues
from gpumemnet.tracing.script.saved_files import SavedFiles, goes_to_gpu
from gpumemnet.tracing.script.simulated_cuda import (
    GPU,
    card_bytes,
    cuda_functions,
    cuda_tensor_types,
    swap_for_meta,
    tensor_new,
)

_META: Final = torch.device("meta")


def move_module(
    module: nn.Module,
    dtype: torch.dtype | None,
    layout: torch.memory_format,
    observer: ScriptObserver,
    numbers: HostNumbers,
) -> None:
    """Move parameters and buffers of ``module`` to the GPU, in the order of ``Module._apply``; each
    keeps its identity.

    Args:
        module: the module.
        dtype: floating-point type to convert to, if any.
        layout: memory format of tensors with as many dimensions as images.
        observer: is told of each tensor that has arrived.
        numbers: keeps those of small buffers.
    """
    for child in module.children():
        move_module(child, dtype, layout, observer, numbers)
    own = own_parameters(module)
    for name, parameter in own.items():
        if parameter is None:
            continue
        if type(parameter).to is not Tensor.to:  # it quantizes itself
            own[name] = parameter.to(GPU)  # type: ignore[assignment]  # of its own class
        elif is_sparse(parameter):
            moved = parameter.detach().to(GPU, dtype)
            own[name] = nn.Parameter(moved, parameter.requires_grad)
    buffers = own_buffers(module)
    for name, buffer in buffers.items():
        if buffer is not None and is_sparse(buffer):
            buffers[name] = buffer.to(GPU, dtype if buffer.is_floating_point() else None)
    with without_function_modes():  # the script sees a CUDA tensor
        _move_own(module, dtype, layout, observer, numbers)
    for parameter in own.values():
        gradient = None if parameter is None else parameter.grad
        if type(gradient) is Tensor and observer.device_of(gradient) != GPU:
            parameter.grad = gradient.to(GPU, parameter.dtype)  # type: ignore[union-attr]


def _move_own(
    module: nn.Module,
    dtype: torch.dtype | None,
    layout: torch.memory_format,
    observer: ScriptObserver,
    numbers: HostNumbers,
) -> None:
    def converted(tensor: Tensor) -> Tensor | None:
        """A new meta tensor in the place of ``tensor``, ``None`` where that may stay."""
        target_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        target_layout = layout if tensor.ndim == IMAGE_DIMENSIONS else torch.preserve_format
        in_layout = target_layout is torch.preserve_format or tensor.is_contiguous(
            memory_format=target_layout
        )
        if (
            (tensor.is_meta or keeps_numbers(tensor))
            and target_dtype == tensor.dtype
            and in_layout
            and observer.device_of(tensor) == GPU
        ):
            return None
        return torch.empty_like(
            tensor, dtype=target_dtype, device="meta", memory_format=target_layout
        )

    own = own_parameters(module)
    # weight_norm makes it anew in each pass; its graph holds the parameters, which forbids a swap
    vars(module).update(
        {
            name: value.detach()
            for name, value in vars(module).items()
            if isinstance(value, Tensor) and value.grad_fn is not None
        }
    )
    for name, parameter in own.items():
        if parameter is None or is_sparse(parameter):
            continue
        fresh = converted(parameter)
        is_scripted = isinstance(module, torch.jit.ScriptModule) and not parameter.is_meta
        if fresh is not None and is_scripted:  # C++ holds it
            own[name] = parameter = nn.Parameter(fresh, parameter.requires_grad)
        elif fresh is not None:
            # Such as a mask, which may get no gradient: one that does is written by its optimizer.
            if (
                not parameter.is_meta
                and is_small(parameter)
                and parameter.numel()
                and numbers.follows([parameter])
                and (parameter == parameter.flatten()[0]).all()
            ):
                numbers.keep(fresh, parameter)
            swap_for_meta(parameter, fresh)
        observer.module_tensor(parameter, module, True)
    buffers = own_buffers(module)
    for name, buffer in buffers.items():
        if buffer is None or is_sparse(buffer):
            continue
        fresh = converted(buffer)
        if fresh is not None and is_lazy(buffer):
            swap_for_meta(buffer, fresh)
            fresh = None
        elif fresh is not None and keeps_numbers(buffer) and not buffer.is_meta:
            fresh = buffer.clone()  # a counter, say
        elif fresh is not None and not buffer.is_meta:
            numbers.keep(fresh, buffer)
        buffers[name] = arrived = buffer if fresh is None else fresh
        observer.module_tensor(arrived, module, False)


@contextmanager
def present_gpu(
    platform: Platform,
    observer: ScriptObserver,
    values: ReadValues,
    requests: GpuRequests,
    count: int = 1,
) -> Iterator[None]:
    """Context in which PyTorch answers for ``count`` GPUs of the platform, and modules move to the
    first."""

    def jit_traced(func: Any, *args: object, **kwargs: object) -> Any:
        values.note("torch.jit.trace was left out")
        if isinstance(func, nn.Module) and not hasattr(func, "save"):  # YOLO has its own
            func.__dict__["save"] = partial(jit_save, func)
        return func

    def jit_save(func: Any, f: Any, *args: object, **kwargs: object) -> None:
        if isinstance(func, torch.jit.ScriptModule | torch.jit.ScriptFunction):
            original_jit_save(func, f, *args, **kwargs)
        else:
            jit_files[str(f)] = func

    def jit_load(f: Any, *args: Any, **kwargs: Any) -> Any:
        return jit_files[str(f)] if str(f) in jit_files else original_jit_load(f, *args, **kwargs)  # type: ignore[no-untyped-call]

    def without_graph(module: Any, args: Any = (), *options: object, **named: object) -> Any:
        values.note("torch.jit traced no operators: a count of them is 0")
        output = module(*args) if isinstance(args, tuple) else module(args)
        return SimpleNamespace(nodes=list), output  # as fvcore asks for it

    def pinned(tensor: Tensor, device: object = None) -> Tensor:
        recorder.host.pinned(tensor.untyped_storage())
        return tensor

    def save(value: object, f: Any, *args: Any, **kwargs: Any) -> None:
        observer.saves()
        saved.save(value, f)

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if saved.has(f):
            return saved.load(f, map_location)
        on_gpu: set[int] = set()

        def placed(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
            if goes_to_gpu(map_location, location):
                on_gpu.add(id_of_storage(storage))
            return storage

        def arrived(value: Any) -> Any:
            if isinstance(value, nn.Module):
                return value.cuda() if any(map(is_on_gpu, value.parameters())) else value
            return value.to(GPU) if is_on_gpu(value) else value

        def is_on_gpu(tensor: Tensor) -> bool:
            return id_of_storage(tensor.untyped_storage()) in on_gpu

        loaded = original_load(f, placed, *args, **kwargs)  # type: ignore[arg-type]
        return map_tensors(loaded, arrived, nn.Module) if on_gpu else loaded

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        target, dtype, _ = parse_target(args, kwargs, observer)
        is_away = is_meta(target) and not called_from(names.TORCH_FOLDER)
        if target is not None and stands_for_gpu(target) and not is_away:
            observer.module_arrived(module)
            move_module(
                module,
                dtype,
                kwargs.get("memory_format") or torch.preserve_format,
                observer,
                requests.numbers,
            )
            return module
        if target is not None:
            if is_away:
                with without_function_modes():
                    value_of(names.MODULE_APPLY)(module, requests.to_meta)
            else:
                leave_gpu(module)
            args = tuple(arg for arg in args if not isinstance(arg, str | torch.device))
            kwargs.pop("device", None)
            if not args and not kwargs:
                return module
        moved: nn.Module = original_to(module, *args, **kwargs)
        return moved

    def leave_gpu(module: nn.Module) -> None:
        buffers = set(map(id, module.buffers()))
        tensors = [*module.parameters(), *module.buffers()]
        held = [each for each in tensors if observer.device_of(each) == GPU]
        if any(type(each) not in (Tensor, nn.Parameter) for each in held):  # shards, quantized
            values.note("a module that the script moves to the host was left on the GPU")
        elif held:
            observer.module_left(held)
            with without_function_modes():
                value_of(names.MODULE_APPLY)(
                    module,
                    lambda tensor: requests.moved_to_host(tensor, is_buffer=id(tensor) in buffers),
                )

    def named_by_number(*args: Any, **kwargs: Any) -> Any:
        args = tuple(GPU if type(arg) is int else arg for arg in args)
        named = {name: GPU if type(arg) is int else arg for name, arg in kwargs.items()}
        with without_function_modes():  # it makes no tensor on the device that it is given
            return parse_to(*args, **named)

    def to_empty(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if not stands_for_gpu(kwargs.get("device", *args)):
            observer.on_host(module)
            return module
        # A parameter changes its identity from the meta device to a GPU; here both are meta, and
        # PyTorch would keep it.
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            emptied: nn.Module = original_to_empty(module, *args, **kwargs)
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(overwrites)
        return emptied

    recorder = observer.recorder
    jit_files: dict[str, Any] = {}
    original_jit_save, original_jit_load = torch.jit.save, torch.jit.load
    original_to, original_to_empty = nn.Module.to, nn.Module.to_empty
    original_load, set_threads = torch.load, torch.set_num_threads
    original_data_ptr, parse_to = torch.UntypedStorage.data_ptr, value_of(names.PARSE_TO)

    saved = SavedFiles(
        observer.device_of,
        requests.has_values,
        lambda: recorder.live_bytes() > 0,
        values.note_once,
    )
    compiler = Compiler(
        recorder,
        lambda tensor: observer.device_of(tensor) == GPU,
        values.note_once,
        observer.graph_runs,
    )
    replacements = (
        *cuda_functions(platform, observer.streams, recorder.live_bytes, recorder.emptied, count),
        *cuda_tensor_types(),
        *libraries.replacements(values.note_once),
        ("torch:Generator", names.cpu_generator(GPU)),
        ("torch:load", load),
        (
            "torch:UntypedStorage.data_ptr",
            lambda storage: (
                id_of_storage(storage) if storage.device == _META else original_data_ptr(storage)
            ),
        ),
        ("torch:Tensor.pin_memory", pinned),
        resizing(recorder),
        ("torch:Tensor.record_stream", lambda tensor, stream: None),
        ("torch:Tensor.__new__", tensor_new(Tensor.__new__, requests.of_default_type)),
        ("torch.nn:Module.to", to),
        ("torch.nn:Module.to_empty", to_empty),
        (names.PARSE_TO, named_by_number),
        ("torch:set_num_threads", lambda count: set_threads(max(count, 1))),
        ("torch.nn:Module.cuda", lambda module, device=None: to(module, GPU)),
        ("torch.nn:Module.cpu", lambda module: to(module, "cpu")),
        ("torch:compile", compiler.compile),
        (
            "torch.nn:Module.compile",
            lambda module, **options: module.__dict__.update(
                forward=compiler.compile(module.forward, **options)
            ),
        ),
        ("torch.jit:trace", jit_traced),
        (names.JIT_EXECUTOR, lambda is_on: True),
        ("torch.jit:save", jit_save),
        ("torch.jit:load", jit_load),
        (names.JIT_GRAPH, without_graph),
        ("torch:save", save),
        ("torch:set_default_device", requests.set_default_device),
        ("torch:set_default_tensor_type", requests.set_default_tensor_type),
        ("torch:get_default_device", lambda: requests.default_device),
        (names.LAZY_METHODS, [*value_of(names.LAZY_METHODS), Tensor.untyped_storage]),
    )
    total_bytes, context_bytes = card_bytes(platform.device)
    ready = preparations(
        platform.device,
        lambda: (context_bytes + recorder.live_bytes(), total_bytes),
        count,
        values.note_once,
    )
    ready.update(libraries.preparations(observer.saves, values.note_once))
    ready.update(host_memory.preparations(requests.weight_on_host))
    with (
        replaced(replacements),
        saved.watching(),
        prepared({**ready, **deepspeed_engine.preparations(observer, requests.without_values)}),
    ):
        yield
