"""Operators whose results are known make the same tensors as their kernels, each with memory of its
own."""

from __future__ import annotations

import torch

from gpumemnet.extract.placement import placement


def test_a_repeated_call_makes_a_new_tensor_with_the_same_layout() -> None:
    x, weight = torch.empty(4, 3, 8, 8, device="meta"), torch.empty(5, 3, 3, 3, device="meta")
    x = x.to(memory_format=torch.channels_last)
    with placement():
        first, second, other = (
            torch.nn.functional.conv2d(x, weight, padding=pad) for pad in (1, 1, 0)
        )
    assert (first.shape, first.stride(), first.dtype) == (
        second.shape,
        second.stride(),
        second.dtype,
    )
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert other.shape == (4, 5, 6, 6)


def test_views_share_their_memory_and_operators_in_place_return_their_argument() -> None:
    x = torch.empty(4, 6, device="meta")
    with placement():
        views = [torch.ops.aten._unsafe_view.default(x, [6, 4]) for _ in range(2)]
        sums = [x.add_(1) for _ in range(2)]
    assert {tensor.untyped_storage()._cdata for tensor in (*views, *sums)} == {
        x.untyped_storage()._cdata
    }


def test_results_depend_on_types_and_numbers() -> None:
    x = torch.empty(4, dtype=torch.int64, device="meta")
    with placement():
        found = [
            torch.add(x, 1).dtype,
            torch.add(x, 1.0).dtype,
            torch.add(x, True).dtype,
            (x + torch.ones(4)).dtype,
        ]
    assert found == [torch.int64, torch.float32, torch.int64, torch.float32]
