"""Private names of Dynamo, AOTAutograd and Inductor, as of PyTorch 2.11 to 2.13: how a function is
captured, and how Inductor plans the buffers of a graph for a CUDA device that is not there.

Importing them takes seconds, so each is looked up when it is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from typing import Any, Final

import torch
from torch import nn

from gpumemnet.torch_private.names import (
    Function,
    aten,
    replaced,
    value_of,
)

DESCRIBE_TENSOR: Final = "torch._subclasses.meta_utils:MetaTensorDescriber.describe_tensor"
FAKE_DISPATCH: Final = "torch._subclasses.fake_tensor:FakeTensorMode.dispatch"
FAKE_VALUE: Final = "torch._dynamo.variables.builder:get_fake_value"
GLOBAL_HOOKS: Final = tuple(
    f"torch.nn.modules.module:_global_{name}"
    for name in (
        *("forward_pre_hooks", "forward_hooks", "forward_hooks_with_kwargs"),
        "forward_hooks_always_called",
    )
)
_CUDA: Final = torch.device("cuda", 0)
_INTERFACE: Final = "torch._dynamo.device_interface:CudaInterface"
_TRITON: Final = "torch._inductor.codegen.triton"
_JOINT_PASSES: Final = "torch._inductor.compile_fx:_recursive_joint_graph_passes"
_PATTERNS: Final = tuple(
    f"torch._inductor.fx_passes.{name}:lazy_init" for name in ("joint_graph", "post_grad")
)


def is_disabled() -> bool:
    """Whether the environment tells PyTorch to compile nothing."""
    return any(
        os.environ.get(name, "0") == "1"
        for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
    )


def compiled_module(module: nn.Module, forward: Function) -> nn.Module:
    """Return ``module`` as ``torch.compile`` does, with this forward pass."""
    shown: Any = value_of("torch._dynamo.eval_frame:OptimizedModule")(
        module, value_of("torch._dynamo.eval_frame:DisableContext")()
    )
    shown.forward = forward
    return shown


def optimized(
    compile: Function,
    function: Function,
    dynamic: bool | None,
    planned: Callable[[str, list[Any]], Callable[[list[Any]], Any]],
    outside: Callable[[], Any],
) -> Function:
    """Return ``function`` as one compiled graph, forward and backward.

    Args:
        compile: ``torch.compile``.
        function: the function.
        dynamic: whether sizes are symbols.
        planned: returns what runs the wrapper of a graph; it gets its source, and the layouts of
            what a backward graph returns.
        outside: context in which graphs are lowered; the backward graph is when it first runs.
    """
    inductor: Any = import_module("torch._inductor.compile_fx")
    joint_passes = value_of(_JOINT_PASSES)

    def joint(graph: Any, *args: Any, **options: Any) -> Any:
        with outside():
            _move_to_cuda(graph.graph)
            return joint_passes(graph, *args, **options)

    def inner(graph: Any, inputs: Sequence[Any], **options: Any) -> Callable[[list[Any]], Any]:
        with outside():
            code = _wrapper_source(graph, inputs, options)
            returned = graph.graph.output_node().args[0] if options.get("is_backward") else ()
            return planned(code, [node and _layout(node.meta["val"]) for node in returned])

    def backend(graph: Any, inputs: Sequence[Any]) -> Any:
        _learn_patterns()
        patterns = [(name, lambda *args: None) for name in _PATTERNS]
        with replaced([*patterns, (_JOINT_PASSES, joint)]):
            return inductor.compile_fx(
                graph,
                inputs,
                inner_compile=inner,
                config_patches={"joint_graph_constant_folding": False},
            )

    with import_module("torch._dynamo.config").patch(wrap_top_frame=True):
        compiled: Function = compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    return compiled


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark that ``run`` takes its arguments as a list, which it empties."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def fake_values() -> Function:
    """Return what takes the place of ``get_fake_value``, by which Dynamo runs a node of its graph.

    ``torch.tensor([], device="meta")`` is a tensor that is not fake, whatever mode is on, so
    ``torch.zeros`` stands for it.
    """
    get = value_of(FAKE_VALUE)

    def run(node: Any, tracer: Any, **options: Any) -> Any:
        made = get(node, tracer, **options)
        if node.target is not torch.tensor or made.device.type != "meta":
            return made
        node.target, node.args = torch.zeros, (tuple(made.shape),)
        node.kwargs = {"dtype": made.dtype, "device": made.device}
        return get(node, tracer, **options)

    return run


@contextmanager
def without_caches() -> Iterator[None]:
    """Context in which Dynamo and AOTAutograd keep no graphs on the disk."""
    with import_module("torch._functorch.config").patch(
        enable_autograd_cache=False, force_non_lazy_backward_lowering=True
    ):
        yield


def _wrapper_source(graph: Any, inputs: Sequence[Any], options: dict[str, Any]) -> str:
    """Return the source of the Python code that Inductor writes around the kernels of a graph.

    It is lowered as ``_InProcessFxCompile.codegen_and_compile`` in
    ``torch/_inductor/compile_fx.py`` does, for CUDA, and without the source of any kernel.
    """
    inductor: Any = import_module("torch._inductor.compile_fx")
    lowering: Any = import_module("torch._inductor.graph").GraphLowering
    virtual: Any = import_module("torch._inductor.virtualized").V
    debug: Any = import_module("torch._inductor.debug").DebugContext
    mode = inductor.detect_fake_mode(inputs)
    with ExitStack() as stack:
        stack.enter_context(replaced(_stand_ins()))
        stack.enter_context(torch.no_grad())
        given = [_on_cuda(value) for value in inputs]
        _move_to_cuda(graph.graph)
        inductor.view_to_reshape(graph)
        inductor._recursive_record_original_output_strides(graph)
        stack.enter_context(virtual.set_fake_mode(mode))
        is_inference = bool(options.get("is_inference"))
        inductor._recursive_post_grad_passes(graph, is_inference=is_inference)
        lowered = lowering(
            graph,
            example_inputs=given,
            shape_env=inductor.shape_env_from_inputs(given),
            is_backward=bool(options.get("is_backward")),
            is_inference=is_inference,
        )
        stack.enter_context(virtual.set_graph_handler(lowered))
        stack.enter_context(virtual.set_debug_handler(debug()))
        lowered.run(*given)
        return str(lowered.codegen()[0].value)


def _move_to_cuda(graph: Any) -> None:
    """Move the nodes of a graph from the meta device to CUDA."""
    for node in graph.nodes:
        value = node.meta.get("val")
        node.meta["val"] = (
            type(value)(map(_on_cuda, value)) if type(value) in (list, tuple) else _on_cuda(value)
        )
        device = node.kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            node.kwargs = {**node.kwargs, "device": _CUDA}


def _layout(tensor: Any) -> tuple[Any, ...]:
    return tensor.size(), tensor.stride(), tensor.dtype


def _on_cuda(value: Any) -> Any:
    """A fake tensor on CUDA in place of one on the meta device; other values as they are."""
    mode = getattr(value, "fake_mode", None)
    if mode is None or value.device.type != "meta":
        return value
    with mode:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_CUDA)


@cache
def _learn_patterns() -> None:
    """Load the patterns of graph passes, which PyTorch makes once, on the device that it has."""
    with replaced([("torch.cuda:is_available", lambda: False)]):
        for name in _PATTERNS:
            value_of(name)(torch.device("cpu"))


def _stand_ins() -> list[tuple[str, object]]:
    """What stands for CUDA and Triton while Inductor plans."""
    properties = staticmethod(value_of("torch.cuda:get_device_properties"))
    kernel = f"{_TRITON}:TritonKernel"
    stand_ins: dict[str, object] = {
        f"{_INTERFACE}.get_device_properties": properties,
        f"{_INTERFACE}.Worker.get_device_properties": properties,
        "torch.version:cuda": "13.0",
        # These methods ask for CUDA itself, their operators do not.
        "torch:Tensor.copy_": lambda *args: aten.copy_.default(*args),
        "torch:Tensor.__invert__": lambda tensor: aten.bitwise_not.default(tensor),
        "torch._inductor.scheduler:has_triton": lambda: True,
        f"{kernel}.codegen_kernel": lambda kernel, name=None: "",
        f"{kernel}.call_kernel": lambda *args, **kwargs: None,
        f"{_TRITON}:TritonScheduling.define_kernel": lambda *args: "kernel",
    }
    return [
        *((name, lambda *args: None) for name in _PATTERNS),
        *stand_ins.items(),
    ]
