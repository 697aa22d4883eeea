"""Reductions, norms and softmax: what they keep on CUDA, and their scratch memory.

A reduction of many values to few outputs splits each output over several thread blocks.  They add
their partial results in global memory: up to 30 MiB for the gradient of one bias.  The split
depends on shape, strides and the GPU's size.  Sources: ``setReduceConfig`` and ``ReduceConfig`` in
``aten/src/ATen/native/cuda/Reduce.cuh``, for the dimensions that
``aten/src/ATen/TensorIterator.cpp`` derives from the tensors.

Operators of normalization and softmax that run as one kernel on CUDA and as a composite on meta tensors:

* Batch norm goes to cuDNN unless it is bfloat16, has no weights, or works on vectors
  (``_select_batch_norm_backend`` in ``aten/src/ATen/native/Normalization.cpp``).
* RMS norm is one kernel that keeps its input and one statistic per row (``_fused_rms_norm`` in
  ``tools/autograd/derivatives.yaml``); the composite keeps three tensors of the size of the input.
* Softmax of float16 with a float32 result casts inside the kernel
  (``aten/src/ATen/native/SoftMax.cpp``), not before it.

Layer norm, group norm and the native batch norm keep the same statistics, of the same types, on
meta tensors: nothing is corrected.

Their scratch memory is partial sums that a second kernel adds up, one per thread block, or per sample and
channel.  Sources, all in ``aten/src/ATen/native/cuda``: ``Normalization.cuh``
(``flexible_launch_configs`` and the channels-last kernels, which also handle matrices),
``group_norm_kernel.cu``, ``layer_norm_kernel.cu``, ``SoftMax.cu``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Final

import torch
from torch import Tensor

from gpumemnet.torch_private.names import aten, below_autograd
from gpumemnet.tracing.operators.elementwise import (
    contiguous,
    copy_bytes,
    is_channels_last,
    memory_format,
)
from gpumemnet.tracing.operators.rules import (
    OVERRIDES,
    SCRATCH_RULES,
    Call,
    Platform,
    Scratches,
    ceil_div,
    exactly,
)

KIND: Final = "reduction"

WARP: Final = 32
MAX_THREADS: Final = 512
MAX_VECTOR: Final = 4
LARGEST_OFFSET: Final = 2**31 - 1
MIN_VALUES_PER_THREAD: Final = 16
MAX_VALUES_PER_THREAD: Final = 256

THREADS_PER_MULTIPROCESSOR: Final[Mapping[tuple[int, int], int]] = {
    (7, 5): 1024,
    **dict.fromkeys(((8, 6), (8, 7), (8, 9), (12, 0), (12, 1)), 1536),
}
"""Compute capability → resident threads per multiprocessor; 2,048 where it is not listed (CUDA
programming guide)."""

MOMENTS_BYTES: Final = 16
"""Size of a partial mean and variance: running mean, sum of squares and two counts
(``WelfordData``)."""
FOREACH_CHUNK: Final = 65_536
"""Elements that one block of a foreach kernel processes (``kChunkSize`` in
``ATen/native/cuda/MultiTensorApply.cuh``)."""


@dataclass(frozen=True, slots=True)
class _Dim:
    """A dimension of the reduction, with strides in elements; ``is_reduced`` if the output lacks
    it."""

    size: int
    stride: int
    output_stride: int
    is_reduced: bool


def reduction_scratch(
    tensor: Tensor,
    dims: Sequence[int] | None,
    accumulator_bytes: int,
    platform: Platform,
) -> Scratches:
    """Return the buffer for reducing ``tensor`` over ``dims``, and one semaphore per column of
    blocks.

    Nothing is needed if one block computes each output.  Tensors that 32-bit offsets cannot address
    are reduced in parts, one after the other: what is added up needs a separate buffer if the
    output's type is too narrow for it.  The buffer of a part is taken for that of the whole.

    Args:
        tensor: the input.
        dims: the dimensions to reduce; ``None`` or an empty sequence for all of them.
        accumulator_bytes: size of a partial result.
        platform: the GPU that it runs on.
    """
    reduced = (
        tuple(sorted({dim % tensor.dim() for dim in dims}))
        if dims and tensor.dim()
        else tuple(range(tensor.dim()))
    )
    return _scratch(
        tuple(tensor.shape),
        tuple(tensor.stride()),
        reduced,
        tensor.element_size(),
        accumulator_bytes,
        platform.device.multiprocessors,
        THREADS_PER_MULTIPROCESSOR.get(platform.compute_capability, 2048),
    )


@lru_cache(maxsize=4096)
def _scratch(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    reduced: tuple[int, ...],
    item_bytes: int,
    accumulator_bytes: int,
    multiprocessors: int,
    threads: int,
) -> Scratches:
    if not all(shape):
        return ()
    dims = _geometry(shape, strides, reduced)
    if not any(dim.is_reduced for dim in dims):
        return ()
    in_parts = math.prod(shape) * item_bytes > LARGEST_OFFSET and item_bytes < accumulator_bytes
    outputs = math.prod(dim.size for dim in dims if not dim.is_reduced) if in_parts else 0
    buffer_bytes, columns = _partial_results(dims, accumulator_bytes, multiprocessors, threads)
    return (
        *exactly(KIND, outputs * accumulator_bytes, buffer_bytes),
        *exactly(KIND, 4 * columns, held=False),
    )


def _partial_results(
    dims: Sequence[_Dim], accumulator_bytes: int, multiprocessors: int, threads: int
) -> tuple[int, int]:
    """Return the bytes of the buffer for partial results, and the number of block columns that
    share it."""
    reduced_count = sum(dim.is_reduced for dim in dims)
    outputs = math.prod(dim.size for dim in dims if not dim.is_reduced)
    inputs = math.prod(dim.size for dim in dims if dim.is_reduced)
    along_memory = reduced_count == len(dims) or dims[0].stride < dims[reduced_count].stride
    vector, width_limit, height_limit = 1, inputs, outputs
    if along_memory:
        if dims[0].stride == 1 and inputs >= 128 and reduced_count == 1:
            width_limit //= MAX_VECTOR
    else:
        if dims[reduced_count].stride == 1:
            vector = _output_vector(dims, reduced_count)
        width_limit, height_limit = outputs // vector, inputs
    width, height = _block(width_limit, height_limit, MAX_THREADS // vector)
    per_output = width if along_memory else 1  # threads that share an output at this point
    output_step = 1 if along_memory else width
    if ceil_div(inputs, per_output) < min(height * 16, MAX_VALUES_PER_THREAD):
        return 0, 0  # each warp computes a different output
    per_thread = ceil_div(inputs, per_output * height)
    blocks = ceil_div(outputs // vector, output_step)
    wanted = multiprocessors * (threads // (width * height))
    if per_thread < MAX_VALUES_PER_THREAD or blocks > wanted:
        return 0, 0
    splits = max(
        min(ceil_div(wanted, blocks), ceil_div(per_thread, MIN_VALUES_PER_THREAD)),
        ceil_div(per_thread, MAX_VALUES_PER_THREAD),
    )
    if splits <= 1:
        return 0, 0
    return accumulator_bytes * outputs * splits * (1 if along_memory else width * vector), blocks


def _geometry(
    shape: tuple[int, ...], strides: tuple[int, ...], reduced: tuple[int, ...]
) -> list[_Dim]:
    """Return the dimensions in the iterator's order: reduced ones first, then by rising stride;
    adjacent ones are merged."""
    output_stride = 1
    dims: list[_Dim] = []
    for index in reversed(range(len(shape))):
        is_reduced = index in reduced
        if shape[index] != 1:
            dims.append(
                _Dim(shape[index], strides[index], 0 if is_reduced else output_stride, is_reduced)
            )
        if not is_reduced:
            output_stride *= shape[index]
    dims.sort(
        key=lambda dim: (not dim.is_reduced, dim.stride if dim.is_reduced else dim.output_stride)
    )
    merged: list[_Dim] = []
    for dim in dims:
        last = merged[-1] if merged else None
        if last and last.is_reduced == dim.is_reduced and _follows(last, dim):
            merged[-1] = _Dim(
                last.size * dim.size, last.stride, last.output_stride, last.is_reduced
            )
        else:
            merged.append(dim)
    return merged


def _follows(last: _Dim, dim: _Dim) -> bool:
    return (
        last.size * last.stride == dim.stride
        and last.size * last.output_stride == dim.output_stride
    )


def _output_vector(dims: Sequence[_Dim], output_index: int) -> int:
    """Return how many adjacent outputs a thread computes at once."""
    vector = MAX_VECTOR
    for amount in (
        dims[output_index].size,
        *(dim.stride for index, dim in enumerate(dims) if index != output_index),
    ):
        while amount % vector:
            vector //= 2
    return vector


def _block(width_limit: int, height_limit: int, max_threads: int) -> tuple[int, int]:
    """Return width and height of a thread block."""
    widest = min(last_power_of_2(width_limit), max_threads)
    highest = min(last_power_of_2(height_limit), max_threads)
    width = min(widest, WARP)
    height = min(highest, max_threads // width)
    return min(widest, max_threads // height), height


def last_power_of_2(amount: int) -> int:
    """Return the largest power of two that is at most ``amount``; 1 for 0."""
    return 1 << max(amount.bit_length() - 1, 0)


def accumulator_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of a partial sum: half types accumulate in fp32, integers in 64 bits."""
    return max(4, dtype.itemsize) if dtype.is_floating_point else 8


def _sum(call: Call, partial_bytes: int = 0) -> Scratches:
    """Return the copy of the input in the result's type, except where kernels convert half types
    while they read (``ReduceOpsUtils.h``), and what reducing it takes."""
    given, dtype = call.arguments["self"], call.outputs[0].dtype
    is_read = given.is_complex() or (given.element_size(), dtype) == (2, torch.float32)
    read = given if is_read else given.to(dtype)
    partial_bytes = partial_bytes or accumulator_bytes(dtype)
    return (
        *exactly("copy", read.nbytes * (read is not given)),
        *reduction_scratch(read, call.arguments.get("dim"), partial_bytes, call.platform),
    )


_moments: Final = partial(_sum, partial_bytes=MOMENTS_BYTES)


def _extremes(call: Call) -> Scratches:
    """Pairs of a value and its place (``MaxOps`` and ``ArgMaxOps`` in ``SharedReduceOps.h``) are as large as
    moments."""
    given, dim = call.arguments["self"], call.arguments["dim"]
    dims = None if dim is None else [dim]
    return reduction_scratch(given, dims, MOMENTS_BYTES, call.platform)


def _logsumexp(call: Call) -> Scratches:
    """The largest values, and what is summed (``aten/src/ATen/native/ReduceOps.cpp``)."""
    return (*exactly(KIND, call.outputs[0].nbytes, call.arguments["self"].nbytes), *_sum(call))


def _pair_gradients(call: Call) -> Scratches:
    """One for each row and each that it is compared with, summed (``cuda/DistanceKernel.cu``)."""
    result, compared = call.outputs[0], call.arguments.get("cdist")
    others = len(result) - 1 if compared is None else compared.shape[-1]
    parts = result[..., None, :, :].repeat_interleave(others, -3)
    return (
        *exactly(KIND, parts.nbytes),
        *reduction_scratch(parts, [-3], parts.element_size(), call.platform),
    )


def _trilinear(call: Call) -> Scratches:
    """The gradient of a bilinear layer's first factor goes through all pairs of numbers of both, for one
    output at a time (``ATen/native/Linear.cpp``)."""
    given = call.arguments
    pairs = given["i1"].shape[0] * given["i2"][0].nbytes
    return exactly(KIND, pairs) if given["sumdim"] == [1, 3] else ()


def _foreach_norm(call: Call) -> Scratches:
    """Return one partial norm per tensor and chunk of the longest tensor
    (``ATen/native/cuda/ForeachReduceOp.cu``)."""
    tensors = call.arguments["self"]
    chunks = max((ceil_div(tensor.numel(), FOREACH_CHUNK) for tensor in tensors), default=0)
    return exactly(KIND, len(tensors) * chunks * 4, held=False)


SCRATCH_RULES.update(
    {
        aten.sum.default: _sum,
        aten.sum.dim_IntList: _sum,
        aten.mean.default: _sum,
        aten.mean.dim: _sum,
        aten.linalg_vector_norm.default: _sum,
        aten.amax.default: _sum,
        aten.amin.default: _sum,
        **dict.fromkeys(
            (aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default), _extremes
        ),
        aten.logsumexp.default: _logsumexp,
        aten._cdist_backward.default: _pair_gradients,
        aten._pdist_backward.default: _pair_gradients,
        aten.std.correction: _moments,
        aten.var.correction: _moments,
        aten.var_mean.correction: _moments,
        aten._trilinear.default: _trilinear,
        aten._foreach_norm.Scalar: _foreach_norm,
    }
)


_LARGEST_CUDNN_BATCH: Final = {True: 880801, False: 65535}
"""By whether it trains."""


def _run_batch_norm(
    original: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    arguments = (weight, bias, running_mean, running_var, training, momentum, eps)
    if not (
        cudnn_enabled
        and weight is not None
        and bias is not None
        and _cudnn_takes(input, weight, training)
        and (running_mean is None) == (running_var is None)
        and (running_mean is not None or training)
    ):
        return original(input, *arguments, cudnn_enabled)
    dense = input.contiguous(memory_format=memory_format(input))
    return aten.cudnn_batch_norm(dense, *arguments)[0]


def _cudnn_takes(input: Tensor, weight: Tensor, training: bool) -> bool:
    return (
        torch.bfloat16 not in (input.dtype, weight.dtype)
        and (input.dtype != torch.float16 or weight.dtype == torch.float32)
        and input.dim() >= 3
        and input.shape[0] <= _LARGEST_CUDNN_BATCH[training]
        and 0 < input.numel() < 2**31 - 1
    )


def _run_rms_norm(
    original: Callable[..., Tensor],
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    unfused = (
        (weight is not None and weight.dtype != input.dtype)
        or input.is_complex()
        or memory_format(input) != torch.contiguous_format
    )
    if unfused:
        return original(input, normalized_shape, weight, eps)
    return _FusedRmsNorm.apply(input, list(normalized_shape), weight, eps)  # type: ignore[no-untyped-call]


class _FusedRmsNorm(torch.autograd.Function):
    """The derivative of ``_fused_rms_norm`` as a kernel; on meta tensors PyTorch decomposes the
    operator."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        normalized_shape: list[int],
        weight: Tensor | None,
        eps: float | None,
    ) -> Tensor:
        with below_autograd():
            output, rstd = aten._fused_rms_norm(input, normalized_shape, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        ctx.normalized_shape = normalized_shape
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        input, weight, rstd = ctx.saved_tensors
        needs_gradient = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with below_autograd():
            results = aten._fused_rms_norm_backward(
                gradients[0], input, ctx.normalized_shape, rstd, weight, needs_gradient
            )
        return results[0], None, results[1], None


def _cast_inside(
    kernel: Any,
    original: Callable[..., Tensor],
    input: Tensor,
    dim: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if input.dtype == torch.float16 and dtype == torch.float32:
        return kernel(input, dim, True)
    return original(input, dim, dtype)


OVERRIDES.update(
    {
        aten.batch_norm.default: _run_batch_norm,
        aten.rms_norm.default: _run_rms_norm,
        aten.softmax.int: partial(_cast_inside, aten._softmax.default),
        aten.log_softmax.int: partial(_cast_inside, aten._log_softmax.default),
    }
)


NORM_KIND: Final = "norm"

TALL_ROWS: Final = 64 * 1024
"""Above this number of rows, the gradients of a layer norm's scale and shift are summed in two
passes."""
ROWS_PER_BLOCK: Final = 32
MAX_GRID: Final = 32 * 1024

BLOCK_THREADS: Final = 512
VALUES_PER_THREAD: Final = 16
BLOCKS_LIMIT: Final = 128
LARGEST_INDEX: Final = 2**31 - 1
FEWEST_BLOCKS: Final = 8
"""With fewer blocks than this, a single block sums each channel of a batch norm."""


def batch_norm_blocks(values: int, channels: int) -> int:
    """Return how many blocks share the ``values`` of each channel in a channels-last batch norm; 1
    needs no scratch."""
    width = min(last_power_of_2(channels), WARP)
    height = min(last_power_of_2(ceil_div(values, VALUES_PER_THREAD)), BLOCK_THREADS // width)
    blocks = min(ceil_div(values, height * VALUES_PER_THREAD), BLOCKS_LIMIT)
    return blocks if blocks >= FEWEST_BLOCKS else 1


def _batch_norm(call: Call) -> Scratches:
    tensor: Tensor = call.arguments["input"]
    if not call.arguments["training"]:
        return ()
    if (
        tensor.numel() >= LARGEST_INDEX
    ):  # generic mean and variance of a copy in fp32 (``batch_norm_choose_impl``)
        copy = torch.empty_like(tensor, dtype=torch.float32)
        dims = [dim for dim in range(tensor.dim()) if dim != 1]
        moments = reduction_scratch(copy, dims, MOMENTS_BYTES, call.platform)
        return (
            *exactly(NORM_KIND, copy.nbytes if tensor.element_size() == 2 else 0),
            *moments,
        )
    return _staged(call, sums=4)


def _staged(call: Call, sums: int) -> Scratches:
    """Return ``sums`` numbers of four bytes per channel and block, and one semaphore per block of
    channels."""
    tensor: Tensor = call.arguments["input"]
    channels = tensor.shape[1] if tensor.dim() > 1 else 0
    if not 0 < tensor.numel() < LARGEST_INDEX or not (
        (tensor.is_contiguous() and tensor.stride(1) == 1) or is_channels_last(tensor)
    ):
        return ()
    blocks = batch_norm_blocks(tensor.numel() // channels, channels)
    if blocks == 1:
        return ()
    semaphores = ceil_div(channels, min(last_power_of_2(channels), WARP))
    return exactly(NORM_KIND, sums * channels * blocks * 4, semaphores * 4)


def _group_norm(call: Call) -> Scratches:
    """Return a factor and a summand per sample and channel."""
    arguments = call.arguments
    if arguments["HxW"] <= 1 or (arguments["weight"] is None and arguments["bias"] is None):
        return ()
    return 2 * exactly(NORM_KIND, _per_channel(call))


def _group_norm_gradient(call: Call) -> Scratches:
    """Return two sums and, for several pixels, a scale per sample and channel, and two factors per
    group."""
    arguments = call.arguments
    groups = _per_channel(call) // max(1, arguments["C"]) * arguments["group"]
    sums = 2 * exactly(NORM_KIND, _per_channel(call))
    if not arguments["output_mask"][0]:
        return sums
    scaled = _per_channel(call) if arguments["HxW"] > 1 and arguments["weight"] is not None else 0
    return (*sums, *exactly(NORM_KIND, groups, groups, scaled))


def _per_channel(call: Call) -> int:
    return (
        int(call.arguments["N"])
        * int(call.arguments["C"])
        * accumulator_bytes(call.arguments["input"].dtype)
    )


def _layer_norm_gradient(call: Call) -> Scratches:
    """Return the partial sums for many rows, and the scratch of their reduction
    (``LaunchGammaBetaBackwardCUDAKernel``)."""
    tensor: Tensor = call.arguments["input"]
    weight: Tensor | None = call.arguments["weight"]
    copies = contiguous("grad_out", "input", after=0)(call)
    if weight is None or not any(call.arguments["output_mask"][1:]):
        return copies
    columns = weight.numel()
    rows = tensor.numel() // columns if columns else 0
    if rows <= TALL_ROWS or columns // WARP >= call.platform.device.multiprocessors // 2:
        return copies
    blocks = min(MAX_GRID // ceil_div(columns, WARP), ceil_div(rows, ROWS_PER_BLOCK))
    sums = torch.empty(blocks, columns, dtype=weight.dtype, device="meta")
    total = reduction_scratch(sums, [0], accumulator_bytes(weight.dtype), call.platform)
    ended = tuple(replace(piece, held=False) for piece in total)
    wanted = sum(call.arguments["output_mask"][1:])
    return (
        *copies,
        *wanted * exactly(NORM_KIND, sums.nbytes),
        *(wanted - 1) * ended,
        *total,
    )


def _softmax_gradient(call: Call) -> Scratches:
    """Return the product of gradient and output, then the copies (``softmax_backward_cuda_out`` in
    ``cuda/SoftMax.cu``)."""
    output: Tensor = call.arguments["output"]
    product = call.arguments["grad_output"] * output
    return exactly("copy", product.nbytes, copy_bytes(product), copy_bytes(output))


SCRATCH_RULES.update(
    {
        aten.native_batch_norm.default: _batch_norm,
        aten.native_batch_norm_backward.default: lambda call: (
            _staged(call, sums=2) if call.arguments["train"] else ()
        ),
        aten.native_group_norm.default: _group_norm,
        aten.native_group_norm_backward.default: _group_norm_gradient,
        aten.native_layer_norm.default: contiguous("input", after=0),
        aten.native_layer_norm_backward.default: _layer_norm_gradient,
        aten._fused_rms_norm.default: contiguous("input", after=0),
        aten._fused_rms_norm_backward.default: _layer_norm_gradient,
        aten.cudnn_batch_norm_backward.default: contiguous("grad_output", like="input", after=0),
        aten._softmax.default: contiguous("self"),
        aten._log_softmax.default: contiguous("self"),
        aten._softmax_backward_data.default: _softmax_gradient,
        aten._log_softmax_backward_data.default: contiguous("grad_output", "output"),
    }
)
