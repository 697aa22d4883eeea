"""``torch.compile`` on the simulated GPU: the memory of the code that Inductor generates.

Dynamo and AOTAutograd capture a function on fake tensors, and the min-cut partitioner chooses what
is saved for the backward pass, all as on a GPU.  Inductor then lowers each graph for a CUDA device
that is not there, fuses it and plans its buffers.  The wrapper that it writes allocates, reuses and
frees these buffers; this wrapper runs, on meta tensors, and its Triton kernels do not.  So nothing
is compiled, and neither a GPU nor Triton is needed.

Fake tensors are on the meta device while autograd sees them, because PyTorch without CUDA has no
autograd for CUDA tensors, and because the corrections of :mod:`gpumemnet.tracing.operators` hold
there.  Each graph is moved to CUDA once it is partitioned.  What cannot be captured as one graph
runs eagerly, and the modules in it are compiled each on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from itertools import count
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpumemnet.errors import first_line
from gpumemnet.extract.checkpointing import checkpoint_calls
from gpumemnet.torch_private import compiler as names
from gpumemnet.torch_private.names import (
    Function,
    aten,
    replaced,
    value_of,
    without_function_modes,
)
from gpumemnet.torch_private.script import MODULE_CALL, modes_of_thread, with_modes, without_modes
from gpumemnet.tracing.recorder import Recorder

_META: Final = torch.device("meta")
_NOTE: Final = (
    "torch.compile: what Inductor's own plan saves, fuses and reuses is counted, as "
    "TORCHDYNAMO_DISABLE=0 in the environment asks"
)
_LEFT_OUT: Final = (
    "torch.compile was left out, and compiled code usually takes less; "
    "TORCHDYNAMO_DISABLE=0 in the environment has Inductor's own plan traced, which takes longer"
)
_GRAPHS: Final = "triton.cudagraphs"
_GRAPH_MODES: Final = ("reduce-overhead", "max-autotune")
"""Modes that use CUDA graphs."""
_MOST_LAYERS: Final = 200
"""Most layers of a model that is captured as a whole, which takes a tenth of a second each."""
_POOLS: Final = count(1 << 20)
"""Numbers of streams that stand for the private pools of CUDA graphs."""


class Compiler:
    """Compiles functions of a script as ``torch.compile`` does.

    Args:
        recorder: records what compiled code allocates.
        on_gpu: whether a tensor is on the simulated GPU.
        note: called with a note.
        starting: called with the arguments of a function that runs as a graph, in which no module
            is seen.
    """

    def __init__(
        self,
        recorder: Recorder,
        on_gpu: Callable[[Tensor], bool],
        note: Callable[[str], None],
        starting: Callable[[object], None],
    ) -> None:
        self._starting = starting
        self._recorder = recorder
        self._on_gpu = on_gpu
        self._note = note
        self._compile: Function = torch.compile
        self._call: Function = value_of(MODULE_CALL)
        self._modes: Any = ()
        self._dispatch: Any = None

    def compile(self, model: Any = None, **options: Any) -> Any:
        """Take the place of ``torch.compile``."""
        if model is None:
            return lambda function: self.compile(function, **options)
        backend, mode = options.get("backend", "inductor"), options.get("mode")
        if options.get("disable"):
            return model
        if names.is_disabled():
            if isinstance(model, nn.Module):
                self._note(_LEFT_OUT)  # scripts ask for its _orig_mod
                return names.compiled_module(model, MethodType(self._call, model))

            @wraps(model)
            def left_out(*args: Any, **kwargs: Any) -> Any:  # libraries have some that never run
                self._note(_LEFT_OUT)
                return model(*args, **kwargs)

            return left_out
        if backend != "inductor":
            self._note(f"torch.compile with the backend {backend!r} was left out")
            return model
        if mode and mode.startswith("max-autotune"):
            self._note("torch.compile: what max-autotune takes while it searches is not counted")
        is_graph = mode in _GRAPH_MODES or bool((options.get("options") or {}).get(_GRAPHS))
        settings = (options.get("dynamic"), next(_POOLS) if is_graph else None)
        if not isinstance(model, nn.Module):
            return self.compiled(model, *settings)
        call = MethodType(self._call, model)
        return names.compiled_module(model, self.compiled(call, *settings, module=model))

    def compiled(
        self,
        function: Function,
        dynamic: bool | None,
        pool: int | None,
        module: nn.Module | None = None,
    ) -> Function:
        """Return ``function`` as it runs where it is compiled.

        Args:
            function: the function.
            dynamic: whether sizes are symbols.
            pool: the stream whose pool it allocates from; that of the current stream by default.
            module: the module that is called, if one is.
        """
        graph: Function | None = None
        parts = _parts(module) if module is not None else []
        is_eager = False

        def compile_parts(why: str) -> None:
            nonlocal is_eager
            is_eager = True
            shown = type(module).__name__ if module is not None else _name(function)
            how = (
                "the modules in it are compiled each on its own, and what is between them is not"
                if parts
                else "it is counted as it is without compiling, which usually takes more"
            )
            self._note(f"torch.compile: {shown} is not captured as one graph ({why}): {how}")
            for part in parts:
                vars(part)["forward"] = self.compiled(part.forward, dynamic, pool, part)

        layers = [] if module is None else [*module.modules()]
        if parts and sum(not _has_children(each) for each in layers) > _MOST_LAYERS:
            compile_parts("to capture it would take minutes")

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal graph
            if is_eager or checkpoint_calls():
                return function(*args, **kwargs)
            self._modes = self._modes or modes_of_thread()
            try:
                with self._hidden():
                    graph = graph or names.optimized(
                        self._compile,
                        function,
                        dynamic,
                        lambda code, returned: self._runs(code, returned, pool, compile_parts),
                        self._lowering,
                    )
                    result = graph(*args, **kwargs)
                self._note(_NOTE)
                if module is None:
                    self._starting((args, kwargs))
                return result
            except Exception as error:
                compile_parts(first_line(getattr(error, "inner_exception", error)))  # of a backend
            return function(*args, **kwargs)

        return run

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        """Context in which Dynamo and AOTAutograd see nothing of the trace."""
        describe, dispatch = value_of(names.DESCRIBE_TENSOR), value_of(names.FAKE_DISPATCH)
        self._dispatch = dispatch

        def described(describer: Any, tensor: Tensor, **options: Any) -> Any:
            found = describe(describer, tensor, **options)
            if found.device.type == "cpu" and self._on_gpu(tensor):
                return replace(found, device=_META)
            return found

        def dispatched(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = dict(kwargs or {})
            if named.get("device") is not None and torch.device(named["device"]).type == "cuda":
                named["device"] = _META
            return dispatch(mode, func, types, args, named)

        hidden = [
            (names.DESCRIBE_TENSOR, described),
            (names.FAKE_DISPATCH, dispatched),
            (MODULE_CALL, self._call),
            (names.FAKE_VALUE, names.fake_values()),
            *((name, {}) for name in names.GLOBAL_HOOKS),
        ]
        with without_modes(), names.without_caches(), replaced(hidden):
            yield

    @contextmanager
    def _lowering(self) -> Iterator[None]:
        """Context in which Inductor sees fake tensors on CUDA, and nothing of the trace."""
        with without_modes(), replaced([(names.FAKE_DISPATCH, self._dispatch)]):
            yield

    def _runs(
        self, code: str, returned: list[Any], pool: int | None, failed: Callable[[str], None]
    ) -> Callable[[list[Any]], Any]:
        """Return a function that runs the wrapper ``code`` on the simulated GPU.

        If a backward pass fails, its forward pass cannot be repeated: ``failed`` is called, and the
        pass allocates what is ``returned``, by its layouts.
        """
        space: dict[str, Any] = {}
        exec(code, space)  # noqa: S102 - PyTorch has generated it
        space["empty_strided_cuda"] = self._allocate
        space["assert_size_stride"] = space["assert_alignment"] = lambda *args: None
        space["extern_kernels"] = _ExternKernels(self._recorder)

        def run(args: list[Any]) -> Any:
            modes = () if modes_of_thread() else self._modes
            with with_modes(modes), without_function_modes(), self._recorder.on_stream(pool):
                try:
                    return space["call"](args)
                except Exception as error:
                    if not returned:
                        raise
                    failed(first_line(error))
                    return [layout and self._allocate(*layout) for layout in returned]

        return names.boxed(run)

    def _allocate(self, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        made = torch.empty_strided(size, stride, dtype=dtype, device=_META)
        self._recorder.requested(made, "inductor")
        return made


class _ExternKernels:
    """``extern_kernels`` of a wrapper: libraries that write into one of Inductor's buffers."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Function:
        operator = getattr(aten, name.removeprefix("bias_")).default

        def run(*args: Any, out: Tensor | None = None, **named: Any) -> Any:
            if out is None:
                return operator(*args, **named)
            self._recorder.called(operator, (), ())
            return out

        return run


def _parts(module: nn.Module) -> list[nn.Module]:
    """The modules right below ``module`` that have parts themselves."""
    found: list[nn.Module] = []
    for child in module.children():
        if type(child).forward is nn.Module.forward:  # a list
            found += _parts(child)
        elif _has_children(child):
            found.append(child)
    return found


def _has_children(module: nn.Module) -> bool:
    return next(module.children(), None) is not None


def _name(function: Function) -> str:
    return str(getattr(function, "__qualname__", "a function"))
