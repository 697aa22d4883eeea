"""Scratch memory of operators, each called as a dispatcher sees it on meta tensors, against sizes
worked out by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpumemnet.gpu import device_profile
from gpumemnet.tracing.operators.elementwise import is_channels_last
from gpumemnet.tracing.operators.library_workspaces import blas_workspace
from gpumemnet.tracing.operators.reductions import reduction_scratch
from gpumemnet.tracing.operators.rules import Platform, Scratch, scratch
from gpumemnet.units import MIB

aten: Any = torch.ops.aten
KIB = 1024
A100 = Platform(device=device_profile("A100"))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def indices(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int64)


def heads(
    batch: int, heads: int, length: int, width: int, dtype: torch.dtype = torch.float16
) -> Tensor:
    """``[batch, heads, length, width]`` as a projection leaves it: by length before heads."""
    return meta(batch, length, heads, width, dtype=dtype).transpose(1, 2)


def pieces(
    operator: Any, *args: Any, platform: Platform = A100, **kwargs: Any
) -> tuple[Scratch, ...]:
    result = operator(*args, **kwargs)
    outputs = [
        each
        for each in (result if isinstance(result, Sequence) else [result])
        if isinstance(each, Tensor)
    ]
    return scratch(operator, args, kwargs, outputs, platform)


def exact(found: Sequence[Scratch]) -> list[int]:
    """Bytes of pieces whose size is certain."""
    assert all(piece.expected_bytes == piece.bound_bytes > 0 for piece in found)
    return [piece.expected_bytes for piece in found]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


# cuBLAS.


@pytest.mark.parametrize(
    ("gpu", "amount"),
    [("V100", 8_519_680), ("A100", 8_519_680), ("L4", 8_519_680), ("H100", 32 * MIB)],
)
def test_a_thread_keeps_the_workspace_of_cublas(gpu: str, amount: int) -> None:
    platform = Platform(device=device_profile(gpu))
    for operator in (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.mm.out,
    ):
        assert blas_workspace(operator, platform) == amount


def test_cublas_copies_matrices_that_lie_neither_by_rows_nor_by_columns() -> None:
    plain = meta(64, 32)
    assert pieces(aten.mm.default, plain, plain.t()) == ()
    assert pieces(aten.mm.default, meta(64, 64)[:, :32], plain.t()) == ()  # rows may lie apart
    assert exact(pieces(aten.mm.default, meta(64, 64)[:, ::2], plain.t())) == [64 * 32 * 4]
    assert exact(pieces(aten.mm.default, meta(1, 1).expand(64, 32), plain.t())) == [64 * 32 * 4]


# Reductions.


def test_the_gradient_of_a_bias_of_many_rows_meets_in_global_memory() -> None:
    # 3,072 / 4 / 32 = 24 blocks of 128 threads over 4 outputs each; the A100 holds 108 x 16, so 72
    # share an output; and ReduceConfig::global_memory_size() counts the 32 threads of a row times 4
    # outputs for each output
    assert 4 * 3072 * 72 * 32 * 4 == 113_246_208
    assert exact(pieces(aten.sum.dim_IntList, meta(8192, 3072), [0])) == [113_246_208, 4 * 24]
    # a GPU of 40 multiprocessors with 1,024 threads each: 40 x 8 / 24 = 14 share an output
    assert exact(
        pieces(
            aten.sum.dim_IntList,
            meta(8192, 3072),
            [0],
            platform=Platform(device=device_profile("T4")),
        )
    ) == [
        4 * 3072 * 14 * 32 * 4,
        4 * 24,
    ]


def test_a_sum_of_all_is_split_so_that_no_thread_adds_up_more_than_256() -> None:
    # 10^8 / 512 threads = 195,313 values, by 256: 763 blocks
    assert exact(pieces(aten.sum.default, meta(10**8))) == [4 * 763, 4]


def test_half_types_are_added_up_in_fp32_and_moments_take_four_numbers() -> None:
    half = pieces(aten.sum.dim_IntList, meta(8192, 3072, dtype=torch.bfloat16), [0])
    assert exact(half) == exact(pieces(aten.sum.dim_IntList, meta(8192, 3072), [0]))
    assert exact(pieces(aten.var_mean.correction, meta(10**8), [0])) == [16 * 763, 4]


def test_clipping_gradients_takes_a_norm_for_each_chunk_of_the_largest() -> None:
    tensors = [meta(65_536 * 10), meta(5)]
    assert exact(pieces(aten._foreach_norm.Scalar, tensors, 2)) == [2 * 10 * 4]


def test_what_32_bits_cannot_address_is_added_up_in_fp32() -> None:
    grad = meta(415, 128, 216, 216, dtype=torch.bfloat16)  # 4,956,733,440 bytes
    found = exact(pieces(aten.sum.dim_IntList, grad, [0, 2, 3]))
    assert found == [128 * 4, 148 * 128 * 4, 4 * 128]  # first sums that bf16 results cannot hold


@pytest.mark.parametrize(
    ("operator", "arguments", "kib"),
    [
        (aten.mse_loss.default, [], 8192),
        (aten.mse_loss.default, [0], 0),
        (aten.huber_loss.default, [], 8192),
        (aten.smooth_l1_loss.default, [], 8192),
    ],
)
def test_losses_form_their_elements_apart(operator: Any, arguments: list[Any], kib: int) -> None:
    given = meta(2048, 1024)
    assert sum(exact(pieces(operator, given, given, *arguments))) == kib * KIB


def test_numbers_are_converted_before_they_are_added_up_and_half_types_while_they_are_read() -> (
    None
):
    given = meta(2048, 1024)
    assert exact(pieces(aten.sum.dim_IntList, given > 0, [1])) == [2048 * 1024 * 8]
    assert pieces(aten.sum.dim_IntList, given.half(), [1], dtype=torch.float32) == ()
    assert exact(pieces(aten.logsumexp.default, given, [1])) == [2048 * 4, 2048 * 1024 * 4]
    assert pieces(aten.amax.default, given, [0]) == pieces(aten.sum.dim_IntList, given, [0])
    assert pieces(aten.max.dim, given, 0) == pieces(aten.var.correction, given, [0])


def test_the_gradient_of_a_cell_sums_those_of_its_gates() -> None:
    state, gates = meta(2048, 512), meta(2048, 2048)
    found = pieces(
        aten._thnn_fused_lstm_cell_backward_impl.default, state, state, state, state, gates, True
    )
    assert found == pieces(aten.sum.dim_IntList, gates, [0]) != ()


def test_what_some_operators_form_before_their_result() -> None:
    given = meta(2048, 1024)
    image, waves = given.view(8, 4, 256, 256), torch.complex(given, given)
    assert exact(pieces(aten.roll.default, given, [1, 2], [0, 1])) == [given.nbytes]
    assert pieces(aten.roll.default, given, [1], [0]) == ()
    chosen = pieces(aten.masked_scatter.default, given, given > 0, given)
    assert exact(chosen) == [8 * given.numel()]
    assert exact(pieces(aten.abs.default, waves)) == [waves.nbytes]
    assert pieces(aten.abs.default, given) == ()
    overlapping = pieces(aten.im2col.default, image, [3, 3], [1, 1], [1, 1], [1, 1])
    assert exact(overlapping) == [image.nbytes]
    assert pieces(aten.im2col.default, image, [4, 4], [1, 1], [0, 0], [4, 4]) == ()


def test_gradients_of_distances_and_of_bilinear_layers_are_formed_for_each_pair() -> None:
    rows, others = meta(64, 1024), meta(128, 1024)
    compared = meta(64, 128)
    assert exact(pieces(aten._euclidean_dist.default, rows, others)) == [
        (1024 + 2) * 4 * count for count in (64, 128)
    ]
    backward = aten._cdist_backward.default
    assert exact(pieces(backward, compared, rows, others, 1.0, compared)) == [128 * rows.nbytes]
    among = meta(64 * 63 // 2)
    assert exact(pieces(aten._pdist_backward.default, among, rows, 2.0, among)) == [
        63 * rows.nbytes
    ]
    weight, places = meta(5, 1024, 128), ([1, 3], [0], [1, 2], [2, 3])
    assert pieces(aten._trilinear.default, rows, weight, compared, *places) == ()
    assert exact(
        pieces(
            aten._trilinear.default,
            meta(64, 5),
            weight,
            compared,
            *places[::-1][:1],
            *places[1:3],
            [1, 3],
        )
    ) == [128 * rows.nbytes]


# Sorting.


def test_the_gradient_of_an_embedding_sorts_its_indices_and_adds_up_in_pieces() -> None:
    count, rows, width = 8 * 1024, 50_257, 768
    found = pieces(
        aten.embedding_dense_backward.default,
        meta(8, 1024, width),
        indices(8, 1024),
        rows,
        -1,
        False,
    )
    parts = count // 10 + count  # ten rows each, and one left over for each index
    tables = (count + 2 * count + parts) * 8
    assert exact(found) == [2 * count * 8, count * 8 + 2 * count * 8, tables + parts * width * 4]
    assert [piece.held for piece in found] == [True, False, False]


def test_the_gradient_of_bags_is_that_of_an_embedding_and_the_largest_are_written() -> None:
    def found(mode: int) -> int:
        each, of_bag, many = indices(8), indices(64), (1000, False)
        bags = (meta(8, 64), of_bag, each, of_bag, each, indices(8, 64), *many, mode, False, None)
        return len(pieces(aten._embedding_bag_backward.default, *bags))

    assert [*map(found, range(3))] == [3, 3, 0]


def test_few_indices_are_added_up_without_sorting() -> None:
    few = (meta(3072, 64), indices(3072), 1000, -1)
    assert pieces(aten.embedding_dense_backward.default, *few, False) == ()
    assert (
        len(pieces(aten.embedding_dense_backward.default, *few, True)) == 3
    )  # frequencies are counted by sorting
    assert (
        len(
            pieces(
                aten.embedding_dense_backward.default,
                meta(3073, 64),
                indices(3073),
                1000,
                -1,
                False,
            )
        )
        == 3
    )
    assert exact(
        pieces(aten.embedding_dense_backward.default, meta(1, 1).expand(3072, 64), *few[1:], False)
    ) == [3072 * 64 * 4]


def test_adding_to_indexed_places_sorts_and_writing_does_not(deterministic: None) -> None:
    target, places, values = meta(1000, 16), [indices(500)], meta(500, 16)
    assert exact(pieces(aten.index_put.default, target, places, values, True)) == [
        4 * 500 * 8,
        2 * 500 * 8,
    ]
    assert (
        exact(pieces(aten.index_put.default, target, places, meta(1, 16), True))[0] == 500 * 16 * 4
    )  # values are expanded
    assert pieces(
        aten.index_put.default, target, places, values, False
    )  # as long as the order matters
    torch.use_deterministic_algorithms(False)
    assert pieces(aten.index_put.default, target, places, values, False) == ()


def test_short_slices_are_sorted_in_place_others_all_at_once_long_ones_one_by_one() -> None:
    assert pieces(aten.sort.default, meta(100, 4096)) == ()
    assert pieces(aten.sort.default, meta()) == ()
    count = 4 * 100_000
    assert exact(pieces(aten.sort.default, meta(4, 100_000))) == [
        2 * count * 8,
        count * 4 + count * 12,
    ]
    assert exact(pieces(aten.sort.default, meta(128, 5000))) == [128 * 5000 * (8 + 12)]
    assert exact(pieces(aten.sort.default, meta(5000))) == [5000 * (8 + 12)]
    assert exact(pieces(aten.sort.default, meta(2, 10**6))) == [10**6 * (8 + 12)]
    assert exact(pieces(aten.topk.default, meta(10**6), 4096)) == []
    assert exact(pieces(aten.topk.default, meta(10**6), 5000)) == [
        5000 * 12,
        5000 * (8 + 12),
        5000 * 8,
    ]
    assert (
        exact(pieces(aten.sort.stable, meta(5000, 128), stable=True, dim=0))[0] == 5000 * 128 * 16
    )  # copied: slices lie apart


# Copies.


def test_kernels_that_read_contiguous_tensors_copy_others() -> None:
    turned = meta(64, 32).t()
    assert exact(pieces(aten.native_layer_norm.default, turned, [64], None, None, 1e-5)) == [
        64 * 32 * 4
    ]
    assert exact(pieces(aten._softmax.default, turned, -1, False)) == [64 * 32 * 4]
    assert pieces(aten._softmax.default, turned.contiguous(), -1, False) == ()
    one = meta(1, 1).expand(32, 64)
    assert exact(
        pieces(aten._log_softmax_backward_data.default, one, meta(32, 64), 1, torch.float32)
    ) == [32 * 64 * 4]


def test_pooling_reads_channels_last_where_the_input_is() -> None:
    last = meta(2, 8, 16, 16).to(memory_format=torch.channels_last)
    assert pieces(aten.max_pool2d_with_indices.default, last, [2, 2]) == ()
    given = (last, [2, 2], [2, 2], [0, 0], [1, 1], False, indices(2, 8, 8, 8))
    assert exact(
        pieces(aten.max_pool2d_with_indices_backward.default, meta(2, 8, 8, 8), *given)
    ) == [2 * 8 * 8 * 8 * 4]


@settings(max_examples=100)
@given(st.lists(st.integers(0, 3), min_size=4, max_size=5), st.randoms(use_true_random=False))
def test_channels_last_is_told_as_pytorch_tells_it(shape: list[int], order: Any) -> None:
    tensor = meta(*shape).permute(order.sample(range(len(shape)), len(shape)))
    formats = (torch.channels_last, torch.channels_last_3d)
    assert is_channels_last(tensor) == (
        torch._prims_common.suggest_memory_format(tensor) in formats
    )


def test_the_gradients_of_a_layer_norm_of_many_rows_are_summed_in_two_passes() -> None:
    def gradients(rows: int, columns: int, mask: list[bool]) -> tuple[Scratch, ...]:
        x, scale, statistic = meta(rows, columns), meta(columns), meta(rows, 1)
        arguments = (x, x, [columns], statistic, statistic, scale, scale, mask)
        return pieces(aten.native_layer_norm_backward.default, *arguments)

    blocks = 32 * 1024 // (96 // 32)  # fewer than rows / 32
    last_sum = exact(reduction_scratch(meta(blocks, 96), [0], 4, A100))
    assert last_sum
    assert exact(gradients(10**6, 96, [True, True, True])) == [
        *(2 * [blocks * 96 * 4]),
        *last_sum,
        *last_sum,
    ]
    assert exact(gradients(10**6, 96, [True, True, False])) == [blocks * 96 * 4, *last_sum]
    assert gradients(10**6, 96, [True, False, False]) == ()
    assert gradients(65_536, 96, [True, True, True]) == ()
    assert (
        gradients(10**6, 54 * 32, [True, True, True]) == ()
    )  # as many columns as keep 108 multiprocessors busy


def test_a_batch_norm_of_vectors_stages_its_sums_where_many_blocks_share_a_channel() -> None:
    def both(values: int, channels: int) -> list[list[int]]:
        x, each = meta(values, channels), meta(channels)
        forward = pieces(aten.native_batch_norm.default, x, each, each, each, each, True, 0.1, 1e-5)
        arguments = (x, x, each, each, each, each, each, True, 1e-5, [True, True, True])
        return [exact(forward), exact(pieces(aten.native_batch_norm_backward.default, *arguments))]

    # Run on PyTorch 2.13's CUDA code: 1,416,240 and 708,120 bytes for 5,288 vectors of 4,215.
    assert both(5288, 4215) == [[1_416_240, 132 * 4], [708_120, 132 * 4]]
    assert both(1000, 4215) == [[], []]  # few values: a block sums a channel alone
    x, each = meta(5288, 4215), meta(4215)
    assert pieces(aten.native_batch_norm.default, x, each, each, each, each, False, 0.1, 1e-5) == ()
    image, channel = meta(64, 32, 16, 16), meta(32)
    given = (channel, channel, channel, channel, True, 0.1, 1e-5)
    assert pieces(aten.native_batch_norm.default, image, *given) == ()
    last = image.to(memory_format=torch.channels_last)
    assert exact(pieces(aten.native_batch_norm.default, last, *given)) == [4 * 32 * 64 * 4, 4]


def test_a_group_norm_takes_two_factors_for_each_sample_and_channel() -> None:
    x, each, statistic = (
        meta(6, 32, 8, 8, dtype=torch.bfloat16),
        meta(32, dtype=torch.bfloat16),
        meta(6, 4),
    )
    forward = pieces(aten.native_group_norm.default, x, each, each, 6, 32, 64, 4, 1e-5)
    assert exact(forward) == 2 * [6 * 32 * 4]
    assert pieces(aten.native_group_norm.default, x, None, None, 6, 32, 64, 4, 1e-5) == ()
    backward = pieces(
        aten.native_group_norm_backward.default,
        x,
        x,
        statistic,
        statistic,
        each,
        6,
        32,
        64,
        4,
        [True, True, True],
    )
    assert exact(backward) == [6 * 32 * 4, 6 * 32 * 4, 6 * 4 * 4, 6 * 4 * 4, 6 * 32 * 4]
    flat = meta(6, 32, 1)
    assert pieces(aten.native_group_norm.default, flat, meta(32), meta(32), 6, 32, 1, 4, 1e-5) == ()
    one_pixel = (flat, flat, statistic, statistic, meta(32), 6, 32, 1, 4)
    assert (
        exact(pieces(aten.native_group_norm_backward.default, *one_pixel, [True, True, True]))
        == [6 * 32 * 4] * 2 + [6 * 4 * 4] * 2
    )
    assert (
        exact(pieces(aten.native_group_norm_backward.default, *one_pixel, [False, True, True]))
        == [6 * 32 * 4] * 2
    )


# Attention.


def test_the_math_kernel_looks_for_rows_that_are_masked_whole() -> None:
    scores = meta(2, 3, 40, 50, dtype=torch.bfloat16)
    assert exact(pieces(aten._safe_softmax.default, scores, -1)) == [2 * 3 * 40 * 50, 2 * 3 * 40, 2]


def test_the_gradient_of_a_softmax_starts_with_a_product() -> None:
    output = meta(64, 32)
    assert exact(
        pieces(aten._softmax_backward_data.default, output, output, -1, torch.float32)
    ) == [64 * 32 * 4]
    turned = meta(32, 64).t()
    arguments = (
        turned,
        output,
        -1,
        torch.float32,
    )  # the product lies as the gradient does, and is read contiguous
    assert exact(pieces(aten._softmax_backward_data.default, *arguments)) == 2 * [64 * 32 * 4]


def flash_backward(query: Tensor, key: Tensor, platform: Platform = A100) -> tuple[Scratch, ...]:
    output, lse, *more = aten._scaled_dot_product_flash_attention.default(query, query, query)
    gradient = torch.empty_like(output)
    arguments = (
        gradient,
        query,
        key,
        key,
        output,
        lse,
        None,
        None,
        query.shape[2],
        key.shape[2],
        0.0,
        False,
        more[4],
        more[5],
    )
    return scratch(
        aten._scaled_dot_product_flash_attention_backward.default, arguments, {}, (), platform
    )


def test_flash_attention_adds_up_the_gradient_of_the_query_in_fp32() -> None:
    query = heads(4, 12, 1000, 80)  # rows are rounded up to 1,024, the width to 96
    assert exact(flash_backward(query, query)) == [4 * 12 * 1024 * 4, 4 * 12 * 1024 * 96 * 4]
    wide = heads(1, 2, 128, 200)
    assert exact(flash_backward(wide, wide))[1] == 2 * 128 * 256 * 4


def test_grouped_queries_have_gradients_of_every_head_first() -> None:
    found = flash_backward(heads(2, 8, 128, 64), heads(2, 2, 128, 64))
    assert exact(found)[2:] == 2 * [2 * 8 * 128 * 64 * 2]
    assert all(piece.held for piece in found)


def test_deterministic_flash_attention_keeps_a_sum_for_each_block(deterministic: None) -> None:
    query = heads(1, 4, 128, 64)
    assert (
        exact(flash_backward(query, query))[1] == 27 * 128 * 4 * 64 * 4
    )  # 108 multiprocessors, 4 heads


def efficient_backward(
    query: Tensor, key: Tensor, value: Tensor, platform: Platform = A100
) -> list[int]:
    batch, count, rows, _ = query.shape
    output = heads(batch, count, rows, value.shape[3], query.dtype)
    statistic = meta(batch, count, rows)
    arguments = (
        output,
        query,
        key,
        value,
        None,
        output,
        statistic,
        None,
        None,
        0.0,
        [True, True, True, False],
    )
    return exact(
        scratch(
            aten._scaled_dot_product_efficient_attention_backward.default,
            arguments,
            {},
            (),
            platform,
        )
    )


def test_memory_efficient_attention_adds_up_in_tiles() -> None:
    half = heads(2, 4, 100, 64)
    tile = 64 * 64 * 4 + 16  # two tiles of rows, one of columns, each with its lock
    assert efficient_backward(half, half, half) == [2 * 4 * 100 * 4, 2 * 4 * 2 * tile]
    single = heads(2, 4, 100, 64, torch.float32)
    product = 2 * 4 * 100 * 64 * 4  # the rows' sums of output x gradient are PyTorch's own there
    assert efficient_backward(single, single, single) == [
        product,
        2 * 4 * 100 * 4,
        2 * 4 * 2 * tile,
    ]


@pytest.mark.parametrize(
    ("gpu", "width", "rows", "keys"),
    [("A100", 80, 128, 128), ("A10", 80, 128, 64), ("T4", 80, 64, 64), ("A100", 256, 128, 64)],
)
def test_tiles_depend_on_the_width_and_the_gpu(gpu: str, width: int, rows: int, keys: int) -> None:
    query = heads(1, 1, 1024, width)
    [_, found] = efficient_backward(query, query, query, Platform(device=device_profile(gpu)))
    sums = (1024 // rows) * -(-width // keys) * (rows * keys * 4 + 16)
    if (
        width > rows
    ):  # outputs do not fit into registers: gradients of key and value are summed in memory too
        sums += 2 * (1024 // keys) * keys * -(-width // rows) * rows * 4
    assert found == sums


def test_wide_heads_are_added_up_in_fp32_in_the_forward_pass() -> None:
    query = heads(2, 4, 100, 256)
    arguments = (query, query, query, None, True)
    assert exact(
        scratch(aten._scaled_dot_product_efficient_attention.default, arguments, {}, (), A100)
    ) == [2 * 4 * 100 * 256 * 4]
    narrow = heads(2, 4, 100, 128)
    assert (
        scratch(
            aten._scaled_dot_product_efficient_attention.default,
            (narrow,) * 3 + (None, True),
            {},
            (),
            A100,
        )
        == ()
    )


def test_cudnn_attention_may_keep_the_gradients_of_the_scores() -> None:
    query = heads(2, 4, 1024, 64)
    operator = aten._scaled_dot_product_cudnn_attention_backward.default
    names = [argument.name for argument in operator._schema.arguments]
    given = {"grad_out": query, "query": query, "key": query, "value": query, "out": query}
    arguments = [given.get(name) for name in names]
    row_sums, sums, scores = 2 * 4 * 1024 * 4, 2 * 4 * 1024 * 64 * 4, 2 * 4 * 1024 * 1024 * 2
    [piece] = scratch(operator, arguments, {}, (), A100)
    assert (piece.expected_bytes, piece.bound_bytes) == (row_sums + sums, row_sums + sums)
    [piece] = scratch(operator, arguments, {}, (), Platform(device=device_profile("H100")))
    assert (piece.expected_bytes, piece.bound_bytes) == (row_sums + sums, row_sums + scores)


def test_a_transform_over_planes_takes_a_workspace_of_its_complex_values() -> None:
    plane = meta(2, 100, 300, dtype=torch.complex64)
    complex_bytes = 2 * 100 * 300 * 8
    assert exact(pieces(aten._fft_c2c.default, plane, [1, 2], 0, True)) == [complex_bytes]
    assert exact(pieces(aten._fft_r2c.default, meta(100, 300), [0, 1], 0, True)) == [100 * 151 * 8]
    half = meta(100, 151, dtype=torch.complex64)
    found = pieces(aten._fft_c2r.default, half, [0, 1], 0, 300)
    assert exact(found) == [100 * 151 * 8] * 2
    assert [piece.held for piece in found] == [True, False]  # its input is copied first
    assert pieces(aten._fft_c2c.default, plane, [2], 0, True) == ()
