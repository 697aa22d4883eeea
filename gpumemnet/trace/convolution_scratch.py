"""What PyTorch's convolution operators take beside their outputs: copies into one layout, cuDNN's workspaces, the bias's sum.

``aten/src/ATen/native/Convolution.cpp`` chooses the kernels and the layout, ``aten/src/ATen/native/cudnn/ConvShared.cpp`` calls
cuDNN for the gradient of the input and then for that of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from gpumemnet.trace.convolution_workspace import (
    BACKWARD_DATA,
    BACKWARD_FILTER,
    FORWARD,
    Convolution,
    benchmark_workspace,
    workspace,
)
from gpumemnet.trace.layout_copies import copy_bytes, is_channels_last
from gpumemnet.trace.platform import Platform
from gpumemnet.trace.reduction_scratch import accumulator_bytes, reduction_buffer
from gpumemnet.trace.scratch import Call, Rule, Scratch, exactly


def _forward(call: Call) -> tuple[Scratch, ...]:
    given: Tensor = call.arguments["input"]
    weight: Tensor = call.arguments["weight"]
    if not call.outputs or not call.outputs[0].numel() or not weight.numel():
        return ()
    wanted = result_layout(given, weight)
    convolution = _convolution(call, given, call.outputs[0], wanted)
    operation = BACKWARD_DATA if call.arguments["transposed"] else FORWARD
    return (*_copied(given, wanted, 0), *_copied(weight, wanted), *cudnn_workspace(convolution, operation, call.platform))


def _backward(call: Call) -> tuple[Scratch, ...]:
    """Copies, then the gradient of the input with a copy of the weight, then that of the weight, then that of the bias."""
    arguments = call.arguments
    grad, given, weight = arguments["grad_output"], arguments["input"], arguments["weight"]
    if not grad.numel() or not given.numel() or not weight.numel():
        return ()
    wanted = result_layout(given, weight)
    convolution = _convolution(call, given, grad, wanted)
    needs_input, needs_weight, needs_bias = arguments["output_mask"]
    pieces = [*_copied(grad, wanted, 0), *(_copied(given, wanted, 0) if needs_weight else ())]
    if needs_input:
        operation = FORWARD if arguments["transposed"] else BACKWARD_DATA
        pieces += [*_copied(weight, wanted, 1), *cudnn_workspace(convolution, operation, call.platform, 1)]
    if needs_weight:
        pieces += cudnn_workspace(convolution, BACKWARD_FILTER, call.platform, 1 + needs_input)
    if needs_bias:
        dims = [dim for dim in range(grad.dim()) if dim != 1]
        pieces += exactly(reduction_buffer(grad, dims, accumulator_bytes(grad.dtype), call.platform), "reduction")
    return tuple(pieces)


def result_layout(given: Tensor, weight: Tensor) -> torch.memory_format:
    """The layout of a convolution on CUDA, of its result and of copies of its operands; meta tensors do not follow it.

    Channels last if the input or the weight is; fp64 never (``cudnn_conv_suggest_memory_format``).
    """
    if given.dtype == torch.float64 or not (is_channels_last(given) or is_channels_last(weight)):
        return torch.contiguous_format
    return torch.channels_last if weight.dim() == 4 else torch.channels_last_3d


def _copied(tensor: Tensor, wanted: torch.memory_format, after: int | None = None) -> tuple[Scratch, ...]:
    return exactly(copy_bytes(tensor, wanted), "copy", held=True, after=after)


def _convolution(call: Call, given: Tensor, returned: Tensor, wanted: torch.memory_format) -> Convolution:
    """The convolution that cuDNN is asked for; one spatial dimension gets a second of size 1, as PyTorch does it."""
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
    """The workspace of one cuDNN call, and before it those that its benchmark tries."""
    if is_native(convolution):
        return ()
    expected, bound = workspace(convolution, operation, platform)
    chosen = (Scratch(expected, bound, "convolution", after=after),) if bound else ()
    if not platform.cudnn_benchmark:
        return chosen
    tried, most = benchmark_workspace(convolution, operation, platform)
    return (Scratch(tried, most, "convolution_benchmark", after=after, once=(operation, convolution)), *chosen)


def is_native(convolution: Convolution) -> bool:
    """Whether PyTorch's own depthwise kernels run, which need no scratch.

    For fp16 PyTorch gives some sizes to cuDNN (``check_cudnn_depthwise_workload_with_filter``), whose depthwise kernels read
    channels first without a workspace too.
    """
    return convolution.is_depthwise and not convolution.channels_last


_ATEN: Any = torch.ops.aten
RULES: Final[dict[Any, Rule]] = {
    _ATEN.convolution.default: _forward,
    _ATEN.convolution_backward.default: _backward,
}
