"""Indexing, embeddings and sorting: scratch memory of operators that sort on the GPU.

The rows of equal indices must be summed in order.  So the gradient of an embedding sorts its
indices and sums pieces of ten rows.  Memory is allocated for the largest possible number of pieces,
which can exceed the incoming gradient.  Sources:
``aten/src/ATen/native/cuda/{Embedding,EmbeddingBackwardKernel,Indexing,SortStable}.cu`` and
``ATen/cuda/cub-RadixSortPairs.cuh``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from gpumemnet.torch_private.operators import aten
from gpumemnet.tracing.operators.rules import (
    Call,
    Rule,
    Scratch,
    ceil_div,
    exactly,
    round_up,
    tensor_bytes,
)

UNSORTED_LIMIT: Final = 3072
"""Up to this number of indices, the gradient of an embedding is summed without sorting."""
ROWS_PER_PIECE: Final = 10
MAX_BLOCK: Final = 1024
BLOCKS_FOR_ATOMICS: Final = 4
"""Below this number of thread blocks per multiprocessor, partial sums are added in place.

PyTorch's name for it is ``MAX_ATOMIC_ACCUM_BLOCKS_PER_SM``.
"""
SMALL_SORT: Final = 4096
"""Up to this number of elements, a slice is sorted in place (``should_use_small_sort``)."""
MANY_SEGMENTS: Final = 128
INDEX_BYTES: Final = 8


def radix_sort_bytes(count: int, pair_bytes: int) -> int:
    """Return the bytes that ``cub::DeviceRadixSort`` needs for ``count`` pairs: a second buffer of
    keys and values."""
    return count * pair_bytes


def _embedding_gradient(call: Call) -> tuple[Scratch, ...]:
    grad: Tensor = call.arguments["grad_output"]
    indices: Tensor = call.arguments["indices"]
    count, by_frequency = indices.numel(), call.arguments["scale_grad_by_freq"]
    copy = exactly(0 if grad.is_contiguous() else tensor_bytes(grad), "copy", held=True)
    if count <= UNSORTED_LIMIT and not by_frequency:
        return copy
    width, index_bytes = indices.element_size(), indices.element_size()
    kept = (3 if by_frequency else 2) * count * width  # sorted, original positions, frequencies
    sorting = count * width + radix_sort_bytes(count, 2 * index_bytes)
    return (
        *copy,
        *exactly(kept, "embedding_backward", held=True),
        *exactly(sorting, "embedding_backward"),
        *exactly(_pieces_bytes(call, grad, count, width), "embedding_backward"),
    )


def _pieces_bytes(call: Call, grad: Tensor, count: int, index_bytes: int) -> int:
    """Return the bytes of the partial sums, and of the tables that assign them to rows."""
    rows: int = call.arguments["num_weights"]
    width = grad.shape[-1]
    segments = min(count, rows)
    pieces = count // ROWS_PER_PIECE + segments
    tables = (count + 2 * segments + pieces) * index_bytes
    warps = round_up(width, 32)
    blocks = ceil_div(segments * warps, min(warps, MAX_BLOCK))
    in_place = (
        blocks < call.platform.device.multiprocessors * BLOCKS_FOR_ATOMICS
        and pieces > 4 * blocks
        and not torch.are_deterministic_algorithms_enabled()
    )
    if in_place:
        return tables + pieces * index_bytes + (rows * width * 4 if grad.element_size() < 4 else 0)
    return tables + pieces * width * max(4, grad.element_size())


def _index_put(call: Call) -> tuple[Scratch, ...]:
    if not call.arguments["accumulate"] and not torch.are_deterministic_algorithms_enabled():
        return ()  # values are written in any order, without a sort
    indices: Sequence[Tensor | None] = call.arguments["indices"]
    given = [index for index in indices if index is not None]
    if not given or given[0].dtype == torch.bool:
        return ()  # the number of elements that a mask selects is only known at run time
    count = math.prod(_broadcast(given))
    values: Tensor = call.arguments["values"]
    target: Tensor = call.arguments["self"]
    selected = count * math.prod(
        target.shape[dim]
        for dim in range(target.dim())
        if dim >= len(indices) or indices[dim] is None
    )
    expanded = selected != values.numel() or not values.is_contiguous()
    return (
        *exactly(selected * values.element_size() if expanded else 0, "copy", held=True),
        *exactly(
            4 * count * INDEX_BYTES, "index_put", held=True
        ),  # linear, sorted, original position, range
        *exactly(radix_sort_bytes(count, 2 * INDEX_BYTES), "index_put"),
    )


def _broadcast(tensors: Sequence[Tensor]) -> torch.Size:
    return torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call, no-any-return]


def _sort(call: Call) -> tuple[Scratch, ...]:
    tensor: Tensor = call.arguments["self"]
    if not tensor.dim():
        return ()
    dim = call.arguments["dim"] % tensor.dim()
    length = tensor.shape[dim]
    if length <= SMALL_SORT:
        return ()
    key_bytes, count = tensor.element_size(), tensor.numel()
    copy = exactly(0 if tensor.stride(dim) == 1 else tensor_bytes(tensor), "copy", held=True)
    if (
        count // length < MANY_SEGMENTS
    ):  # all slices at once: (index, slice) pairs, twice, and the keys
        return (
            *copy,
            *exactly(2 * count * 8, "sort", held=True),
            *exactly(count * key_bytes + radix_sort_bytes(count, key_bytes + 8), "sort"),
        )
    return (
        *copy,
        *exactly(length * INDEX_BYTES + radix_sort_bytes(length, key_bytes + INDEX_BYTES), "sort"),
    )


SCRATCH_RULES: Final[dict[Any, Rule]] = {
    aten.embedding_dense_backward.default: _embedding_gradient,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten._index_put_impl_.default: _index_put,
    aten._unsafe_index_put.default: _index_put,
    aten.sort.default: _sort,
    aten.sort.stable: _sort,
}
