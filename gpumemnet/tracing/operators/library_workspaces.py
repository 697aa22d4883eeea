"""Workspaces of NVIDIA's libraries: cuBLAS for matrix products, cuFFT, cuDNN for convolutions.

Matrix products: the workspace of cuBLAS, copies of operands, and products of sparse matrices.

The workspace is allocated when a thread first calls cuBLAS, and kept until the process ends.
Source: ``aten/src/ATen/cuda/CublasHandlePool.cpp``.  Each thread has one handle, with one workspace
per stream.  So the forward and the backward thread have one workspace each.  cuBLASLt (bias
epilogues of ``addmm``) shares this workspace unless ``TORCH_CUBLASLT_UNIFIED_WORKSPACE`` is 0;
sharing is the default of torch 2.13.  Earlier versions kept a separate 1 MiB per handle
(``CUBLASLT_WORKSPACE_SIZE``).  Convolutions and attention kernels do not call cuBLAS through
PyTorch.

Matrices that are neither row-major nor column-major are copied.

For products of a sparse COO matrix and a dense one, the indices are sorted and summed first where
the matrix is not coalesced, then converted to 32-bit CSR.  cuSPARSE writes its result by columns,
so a result by rows is copied.  cuSPARSE's own buffer is not modelled.  Sources:
``aten/src/ATen/native/sparse/cuda/{SparseCUDATensor,SparseCUDATensorMath}.cu`` and
``SparseBlasLegacy.cpp``.

Convolutions: scratch memory of PyTorch's operators, which are layout copies, cuDNN workspaces, and
the sum for the bias gradient.

Sources: ``aten/src/ATen/native/Convolution.cpp`` chooses the kernels and the layout.
``aten/src/ATen/native/cudnn/ConvShared.cpp`` calls cuDNN for the gradient of the input, then for
the gradient of the weight.

The workspaces are those of cuDNN's own plans where it is installed, else they follow from rules.
PyTorch allocates the workspace of the plan that cuDNN's heuristics rank first
(``aten/src/ATen/native/cudnn/Conv_v8.cpp``), then those of the fallback list, and frees it after
the call.  With ``torch.backends.cudnn.benchmark`` it first allocates the largest workspace of all
plans, halved while it does not fit, times the plans, frees it and empties the allocator's cache.
Which plan is fastest cannot be known without the GPU.  It is assumed to be the one that the
heuristics rank first where published readings show a workspace (:func:`keeps_workspace`), and
otherwise, of the first few, the one that takes least.

The rules are for machines without cuDNN (:mod:`gpumemnet.cudnn`).  The workspace of the plan that
cuDNN ranks first nearly always holds copies of the image, of the result or of both in another
layout, and some multiple of the weight: a copy, or partial sums of its gradient.  What is copied is
learned from answers of cuDNN 9.8 and 9.28; in fp32, from published readings too.
``copied_tensors.json`` holds one decision tree for each compute capability, operation, type and
layout.  ``benchmarks/convolution_workspaces.py`` makes it, and says how far it is off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Final

import torch
from torch import Tensor

from gpumemnet.atomic_files import shipped_json
from gpumemnet.cudnn.execution_plans import (
    BACKWARD_DATA,
    BACKWARD_FILTER,
    FORWARD,
    ConvolutionQuestion,
)
from gpumemnet.physics.element_types import TF32_SMALLEST_CHANNELS
from gpumemnet.torch_private.names import OpOverload, aten, dense_parts
from gpumemnet.tracing.operators.elementwise import (
    INDEX_BYTES,
    copy_bytes,
    gradient_layouts,
    radix_sort_bytes,
    result_layout,
)
from gpumemnet.tracing.operators.reductions import accumulator_bytes, reduction_scratch
from gpumemnet.tracing.operators.rules import (
    SCRATCH_RULES,
    Call,
    Platform,
    Rule,
    Scratch,
    Scratches,
    exactly,
)
from gpumemnet.tracing.timeline import CONVOLUTION_SEARCH, CONVOLUTION_WORKSPACE

BLAS_OPERATORS: Final = frozenset(
    {
        aten.mm,
        aten.addmm,
        aten._addmm_activation,
        aten.bmm,
        aten.baddbmm,
        aten._trilinear,
        aten._euclidean_dist,
        aten.addbmm,
        aten.mv,
        aten.addmv,
        aten.dot,
        aten.vdot,
        aten._scaled_mm,
        aten._int_mm,
    }
)
"""Operators that use cuBLAS."""


def blas_workspace(operator: OpOverload, platform: Platform) -> int | None:
    """Return the bytes that a thread keeps after it first calls ``operator``; ``None`` if that does
    not use cuBLAS."""
    return (
        platform.device.blas_workspace_bytes if operator.overloadpacket in BLAS_OPERATORS else None
    )


_KIND: Final = "sparse_product"
_INT_BYTES: Final = 4
_SORTED_LISTS: Final = 3
"""Flattened indices, their original positions, and where each new index begins."""


def sparse_product(matrix: Tensor, dense: Tensor, result: Tensor) -> Scratches:
    """Return the scratch memory of the product of ``matrix`` and ``dense``; nothing for another
    layout than COO."""
    if matrix.layout is not torch.sparse_coo or matrix.ndim > 2:
        return ()
    rows, columns = result.shape
    count = len(dense_parts(matrix)[-1])
    is_by_columns = result.stride() == (1, rows)
    is_read_in_place = dense.stride() == (1, dense.shape[0]) or (
        dense.stride(1) == 1 and dense.stride(0) != columns
    )
    return (
        *(() if matrix.is_coalesced() else _coalescing(matrix, count)),
        *exactly(_KIND, _INT_BYTES * (rows + 1)),
        *exactly(_KIND, _INT_BYTES * count, held=False),  # rows as 32-bit numbers
        *exactly(_KIND, _INT_BYTES * count),
        *exactly(
            "copy",
            0 if is_by_columns else result.nbytes,
            0 if is_read_in_place else copy_bytes(dense),
        ),
    )


def _coalescing(matrix: Tensor, count: int) -> Scratches:
    lists = _SORTED_LISTS * INDEX_BYTES * count
    return (
        *exactly("sort", lists + radix_sort_bytes(count, 2 * INDEX_BYTES), held=False),
        *exactly("copy", sum(each.nbytes for each in dense_parts(matrix))),
    )


def _transform(call: Call) -> Scratches:
    """Scratch memory of a Fourier transform (``aten/src/ATen/native/cuda/SpectralOps.cpp``).

    From complex to real it works on a copy, because cuFFT may overwrite its input.  The workspace
    of a plan over several dimensions is as large as its complex values: cuFFT does not say so, but
    readings do (github.com/arrayfire/arrayfire/issues/1443).  That of one dimension is unknown.
    """
    source, result = call.arguments["self"], call.outputs[0]
    transformed = source if source.is_complex() else result
    is_to_real = source.is_complex() and not result.is_complex()
    is_deep = len(call.arguments["dim"]) > 1
    return (
        *exactly("copy", source.nbytes if is_to_real else 0),
        *exactly("transform", transformed.nbytes if is_deep else 0, held=False),
    )


def _matrices(*names: str) -> Rule:
    """Return a rule for two matrices; for dense ones see ``prepare_matrix_for_cublas`` in
    ``ATen/native/cuda/Blas.cpp``."""

    def copies(call: Call) -> Scratches:
        left, right = (call.arguments[name] for name in names)
        if not (left.layout is right.layout is torch.strided):
            return sparse_product(left, right, call.outputs[0])
        copied = (
            matrix
            for matrix in (left, right)
            if not _is_matrix(matrix.shape[-2:], matrix.stride()[-2:])
        )
        return exactly("copy", *(each.nbytes for each in copied))

    return copies


def _distances(call: Call) -> Scratches:
    """Both factors, each with its squared length and a one, and before the second one twice the first
    (``aten/src/ATen/native/Distance.cpp``)."""
    given = call.arguments["x1"], call.arguments["x2"]
    first, second = (each.nbytes // each.shape[-1] * (each.shape[-1] + 2) for each in given)
    return exactly("copy", first, max(second, given[0].nbytes - call.outputs[0].nbytes))


def _is_matrix(shape: Sequence[int], strides: Sequence[int]) -> bool:
    rows, columns = shape
    by_columns = strides[0] == 1 and strides[1] >= max(1, rows)
    by_rows = strides[1] == 1 and strides[0] >= max(1, columns)
    return by_columns or by_rows or not rows or not columns


SCRATCH_RULES.update(
    {
        aten.mm.default: _matrices("self", "mat2"),
        aten.addmm.default: _matrices("mat1", "mat2"),
        aten._addmm_activation.default: _matrices("mat1", "mat2"),
        aten._sparse_addmm.default: _matrices("mat1", "mat2"),
        aten.bmm.default: _matrices("self", "mat2"),
        aten.baddbmm.default: _matrices("batch1", "batch2"),
        aten._euclidean_dist.default: _distances,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """A convolution of images ``[batch, channels, *image]`` to ``[batch, outputs, *result]``.

    A transposed convolution exchanges image and result: its forward pass is the backward pass of
    the data.

    Attributes:
        batch: samples.
        channels, outputs: channels of the image and of the result, summed over the groups.
        image, result, filter: sizes of the spatial dimensions, one to three.
        stride, padding, dilation: by spatial dimension.
        groups: number of independent convolutions into which the channels are split.
        dtype: type of the tensors.
        channels_last: whether the memory layout of the tensors is channels last.
    """

    batch: int
    channels: int
    outputs: int
    image: tuple[int, ...]
    result: tuple[int, ...]
    filter: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    dtype: torch.dtype
    channels_last: bool

    @property
    def weight_elements(self) -> int:
        """Number of elements of the weight."""
        return self.channels // self.groups * self.outputs * math.prod(self.filter)

    @property
    def tensor_bytes(self) -> tuple[int, int, int]:
        """Bytes of image, result and weight."""
        size = self.dtype.itemsize
        image = self.batch * self.channels * math.prod(self.image)
        result = self.batch * self.outputs * math.prod(self.result)
        return image * size, result * size, self.weight_elements * size

    @property
    def is_depthwise(self) -> bool:
        """Whether every group has one channel."""
        return self.groups > 1 and self.groups == self.channels


IMAGE, RESULT = 1, 2
"""Bits of a leaf's number: what is copied."""


def features(convolution: Convolution) -> tuple[float, ...]:
    """Return what the trees of the file ask for, under its names of features: sizes, as logarithms
    where only their order matters."""
    channels, outputs = (
        convolution.channels // convolution.groups,
        convolution.outputs // convolution.groups,
    )
    image, result, taps = (
        math.prod(sizes) for sizes in (convolution.image, convolution.result, convolution.filter)
    )
    return (
        convolution.batch,
        channels,
        outputs,
        convolution.groups,
        taps,
        math.prod(convolution.stride),
        math.prod(convolution.dilation),
        image,
        result,
        convolution.batch * result,
        _odd(channels),
        _odd(outputs),
        math.log2(max(1, convolution.batch * result * channels * taps * outputs)),
        channels * image / max(1, outputs * result),
        channels * outputs * taps,
    )


def copied_bytes(convolution: Convolution, operation: str, capability: tuple[int, int]) -> int:
    """Return the expected workspace of one operation on a GPU of this compute capability."""
    of_device = _nearest(capability)
    tree = tree_name(of_device, operation, convolution.dtype.itemsize, convolution.channels_last)
    node = _document()["trees"][tree]
    values = features(convolution)
    while "feature" in node:
        node = node["below" if values[node["feature"]] <= node["limit"] else "above"]
    image, result, weight = convolution.tensor_bytes
    copies = (image if node["copies"] & IMAGE else 0) + (result if node["copies"] & RESULT else 0)
    return copies + round(float(node["weights"]) * weight)


def tree_name(capability: str, operation: str, itemsize: int, channels_last: bool) -> str:
    """Return the key of a tree in the file."""
    return f"{capability} {operation} {8 * itemsize}-bit {'channels last' if channels_last else 'contiguous'}"


def _odd(channels: int) -> int:
    """Return the largest power of two up to 8 that divides the channels: tensor cores read several
    at a time."""
    return math.gcd(channels, 8)


_document: Final = partial(shipped_json, "tracing/operators/copied_tensors.json")


@cache
def _nearest(capability: tuple[int, int]) -> str:
    """Return the compute capability whose trees are used: the newest that is not newer, or the
    oldest there is."""
    known = [tuple(map(int, name.split("."))) for name in _document()["capabilities"]]
    older = [each for each in known if each <= capability]
    major, minor = max(older) if older else min(known)
    return f"{major}.{minor}"


TF32_CAPABILITY: Final = (8, 0)
"""First compute capability whose tensor cores run fp32 convolutions, in TF32."""
SEARCH_COPIES: Final = 1.5
"""Largest workspace that a search tries, by the bytes of image, result and weight.  Of 4,400
convolutions of real networks, the median is 1.0 (H100) to 1.5 (A100, Ada) in fp32 and 1.0 to 2.1 in
fp16; the 95th percentile is 2.2 to 5."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """Workspace bytes of one operation.

    Attributes:
        expected_bytes: that of the plan that PyTorch is expected to run.
        bound_bytes: the largest of the plans that may run instead.
        search_bytes: the largest that a search tries.
    """

    expected_bytes: int
    bound_bytes: int
    search_bytes: int


def workspace_by_rules(convolution: Convolution, operation: str, platform: Platform) -> Workspace:
    """Return the workspace of one operation by rules."""
    all_bytes = sum(convolution.tensor_bytes)
    expected = _expected_bytes(convolution, operation, platform)
    bound = max(expected, all_bytes)
    return Workspace(expected, bound, max(bound, round(SEARCH_COPIES * all_bytes)))


def _expected_bytes(convolution: Convolution, operation: str, platform: Platform) -> int:
    """Return the workspace of the plan that is expected to run.

    fp32 convolutions copy tensors only for the gradient of filters larger than 1 x 1, and there all
    three if tensor cores run on channels first.  The patches of a vision transformer take no
    workspace.  Published readings say so: of an A100, with a search and without, and of two GeForce
    cards (``docs/accuracy/convolution-workspaces.md``).  Answers of cuDNN 9.8 and 9.28 copy more.
    """
    if not _is_learned(convolution, platform):
        return 0
    if convolution.dtype == torch.float32:
        if not keeps_workspace(convolution, operation) or _embeds_patches(convolution):
            return 0
        if _runs_on_tensor_cores(convolution, platform) and not convolution.channels_last:
            return sum(convolution.tensor_bytes)
    return copied_bytes(convolution, operation, platform.compute_capability)


def _embeds_patches(convolution: Convolution) -> bool:
    """Whether the filter takes an image of few channels apart into patches that do not overlap."""
    return convolution.stride == convolution.filter and not _is_wide(convolution)


def _runs_on_tensor_cores(convolution: Convolution, platform: Platform) -> bool:
    """Whether an fp32 convolution runs in TF32."""
    return platform.compute_capability >= TF32_CAPABILITY and _is_wide(convolution)


def _is_wide(convolution: Convolution) -> bool:
    """Whether a group has the channels that tensor cores read at once in fp32."""
    return (
        min(convolution.channels, convolution.outputs) // convolution.groups
        >= TF32_SMALLEST_CHANNELS
    )


def keeps_workspace(convolution: Convolution, operation: str) -> bool:
    """Whether an fp32 convolution keeps a workspace: for the gradient of filters larger than 1 x 1,
    by published readings."""
    return operation == BACKWARD_FILTER and max(convolution.filter) > 1


def _is_learned(convolution: Convolution, platform: Platform) -> bool:
    """Whether answers for such convolutions were learned from; the others are expected to need no
    workspace.

    fp16 stands for bf16, which older GPUs convert without cuDNN's tensor cores; fp32 was asked for
    with TF32 allowed.
    """
    if convolution.dtype == torch.float32:
        return platform.tf32
    return convolution.dtype == torch.float16 or (
        convolution.dtype == torch.bfloat16 and platform.compute_capability >= (8, 0)
    )


_CONTENDERS: Final = 3
"""Number of plans among which the bound is taken, and the plan after a search: versions of cuDNN
order them differently."""


def workspace_by_plans(
    convolution: Convolution, operation: str, platform: Platform
) -> Workspace | None:
    """Return the workspace by cuDNN's own plans; ``None`` if cuDNN is not asked or has no
    answer."""
    if platform.cudnn is None:
        return None
    plans = platform.cudnn.plans(platform.device, _question(convolution, operation))
    if plans is None:
        return None
    dtype = str(convolution.dtype).removeprefix("torch.")
    capacity_bytes = platform.device.capacity_bytes
    sizes = [
        plan.workspace_bytes
        for plan in plans.for_pytorch(dtype, platform.tf32)
        if plan.workspace_bytes <= capacity_bytes
    ]
    if not sizes:
        return None
    contenders = sizes[:_CONTENDERS]
    takes_least = platform.cudnn_benchmark and not keeps_workspace(convolution, operation)
    return Workspace(min(contenders) if takes_least else sizes[0], max(contenders), max(sizes))


def _question(convolution: Convolution, operation: str) -> ConvolutionQuestion:
    return ConvolutionQuestion(
        operation=operation,
        image=(convolution.batch, convolution.channels, *convolution.image),
        weight=(
            convolution.outputs,
            convolution.channels // convolution.groups,
            *convolution.filter,
        ),
        result=(convolution.batch, convolution.outputs, *convolution.result),
        channels_last=convolution.channels_last,
        dtype=str(convolution.dtype).removeprefix("torch."),
        padding=convolution.padding,
        stride=convolution.stride,
        dilation=convolution.dilation,
    )


def _forward(call: Call) -> Scratches:
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


def _backward(call: Call) -> Scratches:
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
        pieces += exactly("copy", grad.nbytes, after=0)
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


def _copied(tensor: Tensor, wanted: torch.memory_format, after: int | None = None) -> Scratches:
    return exactly("copy", copy_bytes(tensor, wanted), after=after)


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
) -> Scratches:
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


SCRATCH_RULES.update(
    {
        aten._fft_r2c.default: _transform,
        aten._fft_c2c.default: _transform,
        aten._fft_c2r.default: _transform,
        aten.convolution.default: _forward,
        aten.convolution_backward.default: _backward,
    }
)
