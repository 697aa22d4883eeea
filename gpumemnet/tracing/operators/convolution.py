"""Convolutions: scratch memory of PyTorch's operators, which are layout copies, cuDNN workspaces, and
the sum for the bias gradient.

Sources: ``aten/src/ATen/native/Convolution.cpp`` chooses the kernels and the layout.
``aten/src/ATen/native/cudnn/ConvShared.cpp`` calls cuDNN for the gradient of the input, then for
the gradient of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from gpumemnet.cudnn.execution_plans import BACKWARD_DATA, BACKWARD_FILTER, FORWARD
from gpumemnet.torch_private.operators import aten
from gpumemnet.tracing.operators.convolution_workspaces import (
    Convolution,
    workspace_by_plans,
    workspace_by_rules,
)
from gpumemnet.tracing.operators.layouts import (
    copy_bytes,
    gradient_layouts,
    result_layout,
)
from gpumemnet.tracing.operators.reductions import accumulator_bytes, reduction_scratch
from gpumemnet.tracing.operators.rules import Call, Rule, Scratch, exactly, tensor_bytes
from gpumemnet.tracing.options import Platform
from gpumemnet.tracing.timeline import CONVOLUTION_SEARCH, CONVOLUTION_WORKSPACE


def _forward(call: Call) -> tuple[Scratch, ...]:
    given: Tensor = call.arguments["input"]
    weight: Tensor = call.arguments["weight"]
    if not call.outputs or not call.outputs[0].numel() or not weight.numel():
        return ()
    wanted = result_layout(given, weight)
    convolution = _as_cudnn_sees_it(call, given, call.outputs[0], wanted)
    operation = BACKWARD_DATA if call.arguments["transposed"] else FORWARD
    return (
        *_copied(given, wanted, 0),
        *_copied(weight, wanted),
        *cudnn_workspace(convolution, operation, call.platform),
    )


def _backward(call: Call) -> tuple[Scratch, ...]:
    """Return the scratch in this order: copies, gradient of the input (with a weight copy), of the
    weight, of the bias."""
    arguments = call.arguments
    grad, given, weight = arguments["grad_output"], arguments["input"], arguments["weight"]
    if not grad.numel() or not given.numel() or not weight.numel():
        return ()
    needs_input, needs_weight, needs_bias = arguments["output_mask"]
    wanted = result_layout(given, weight)
    gradients = gradient_layouts(grad, given, weight, needs_weight)
    convolution = _as_cudnn_sees_it(call, given, grad, wanted)
    pieces = [*(_copied(given, wanted, 0) if needs_weight else ())]
    if gradients.is_moved:
        pieces += exactly(tensor_bytes(grad), "copy", held=True, after=0)
    else:
        pieces += _copied(grad, gradients.of_input if needs_input else gradients.of_weight, 0)
    if needs_input:
        operation = FORWARD if arguments["transposed"] else BACKWARD_DATA
        pieces += [
            *_copied(weight, gradients.of_input, 1),
            *cudnn_workspace(convolution, operation, call.platform, 1),
        ]
    if needs_weight:
        pieces += cudnn_workspace(convolution, BACKWARD_FILTER, call.platform, 1 + needs_input)
    if needs_bias:
        dims = [dim for dim in range(grad.dim()) if dim != 1]
        pieces += reduction_scratch(grad, dims, accumulator_bytes(grad.dtype), call.platform)
    return tuple(pieces)


def _copied(
    tensor: Tensor, wanted: torch.memory_format, after: int | None = None
) -> tuple[Scratch, ...]:
    return exactly(copy_bytes(tensor, wanted), "copy", held=True, after=after)


def _as_cudnn_sees_it(
    call: Call, given: Tensor, returned: Tensor, wanted: torch.memory_format
) -> Convolution:
    """Return the convolution that PyTorch passes to cuDNN; a 1D convolution gets a second dimension
    of size 1."""
    arguments = call.arguments
    image, result = (returned, given) if arguments["transposed"] else (given, returned)
    weight: Tensor = arguments["weight"]
    flat = image.dim() == 3

    def spatial(values: Sequence[int], filler: int) -> tuple[int, ...]:
        values = [values[0]] * (image.dim() - 2) if len(values) == 1 else list(values)
        return tuple([filler, *values] if flat else values)

    return Convolution(
        batch=image.shape[0],
        channels=image.shape[1],
        outputs=result.shape[1],
        image=spatial(image.shape[2:], 1),
        result=spatial(result.shape[2:], 1),
        filter=spatial(weight.shape[2:], 1),
        stride=spatial(arguments["stride"], 1),
        padding=spatial(arguments["padding"], 0),
        dilation=spatial(arguments["dilation"], 1),
        groups=arguments["groups"],
        dtype=image.dtype,
        channels_last=wanted is not torch.contiguous_format,
    )


def cudnn_workspace(
    convolution: Convolution, operation: str, platform: Platform, after: int | None = None
) -> tuple[Scratch, ...]:
    """Return the workspace of one cuDNN call, preceded by the workspaces that its benchmark
    tries."""
    if is_native(convolution):
        return ()
    found = workspace_by_plans(convolution, operation, platform) or workspace_by_rules(
        convolution, operation, platform
    )
    chosen = (
        (Scratch(found.expected_bytes, found.bound_bytes, CONVOLUTION_WORKSPACE, after=after),)
        if found.bound_bytes
        else ()
    )
    if not platform.cudnn_benchmark:
        return chosen
    search_bytes = found.search_bytes
    if platform.further_search_bytes is not None:
        further = platform.further_search_bytes(
            convolution, operation, platform.device.capacity_bytes
        )
        search_bytes = max(search_bytes, further)
    search = Scratch(
        search_bytes, search_bytes, CONVOLUTION_SEARCH, after=after, once=(operation, convolution)
    )
    return (search, *chosen)


def is_native(convolution: Convolution) -> bool:
    """Whether PyTorch's native depthwise kernels run, which need no scratch.

    For fp16, PyTorch sends some sizes to cuDNN (``check_cudnn_depthwise_workload_with_filter``).
    The depthwise kernels of cuDNN read channels first and need no workspace either.
    """
    return convolution.is_depthwise and not convolution.channels_last


SCRATCH_RULES: Final[dict[Any, Rule]] = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}
