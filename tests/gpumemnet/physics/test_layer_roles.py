"""What the order of layers tells: rotations, inner sums, blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumemnet.job.layers import CODE_OF_KIND, KINDS
from gpumemnet.physics.layer_roles import (
    BLOCK_BEGIN,
    CONSTANT,
    DEPTHWISE,
    IN_BLOCK,
    INNER_SUM,
    PASSED_ON,
    SIBLING,
    WRITTEN_OUT,
    fill_roles,
)

ROTATED = ("multiply", "other", "concatenate", "multiply", "add")
FEED_FORWARD = ("linear", "relu", "linear", "add")
ATTENDS = ("linear", "attention", "linear", "add")


def roles_of(
    *kinds: str, counts: tuple[int, ...] = (), widths: dict[int, int] | None = None, parameters: dict[int, int] | None = None
) -> list[int]:
    """Roles of layers that are as wide as each other and have no parameters, but those at the places named."""
    roles = np.zeros(len(kinds), dtype=np.int64)
    activations, owned = np.ones(len(kinds)), np.zeros(len(kinds))
    for numbers, given_ones in ((activations, widths), (owned, parameters)):
        for place, number in (given_ones or {}).items():
            numbers[place] = number
    codes = np.array([CODE_OF_KIND[kind] for kind in kinds], dtype=np.int64)
    fill_roles(roles, np.array(counts or (len(kinds),)), codes, activations, owned)
    return [int(role) for role in roles]


def places(roles: list[int], flag: int) -> list[int]:
    return [place for place, role in enumerate(roles) if role & flag]


def test_queries_and_keys_are_rotated() -> None:
    kinds = ("rms_norm", "linear", "linear", "linear", *ROTATED, *ROTATED, "attention", "linear", "add", *FEED_FORWARD)
    roles = roles_of(*kinds)
    assert places(roles, CONSTANT) == [4, 7, 9, 12]
    assert places(roles, INNER_SUM) == [8, 13]
    assert places(roles, PASSED_ON) == [1, 2, 6, 11]  # queries and keys, and the halves exchanged; attention keeps the values
    assert places(roles, BLOCK_BEGIN) == [0]
    assert places(roles, IN_BLOCK) == list(range(len(kinds)))


@pytest.mark.parametrize(
    ("kinds", "siblings"),
    [
        (("rms_norm", "linear", "linear", "linear", *ROTATED, *ROTATED, "attention"), [2, 3]),
        (("linear", "linear", "linear", "attention", "linear", "add"), [1, 2]),
        (("linear", "linear", "linear", "linear", "matmul", "softmax", "matmul", "linear"), [2, 3]),  # one before the three
        (("linear", "silu", "linear", "multiply", "linear"), [2]),  # a gate
        (("linear", "attention", "linear", "relu", "linear", "linear"), []),
    ],
)
def test_projections_of_the_same_input(kinds: tuple[str, ...], siblings: list[int]) -> None:
    assert places(roles_of(*kinds), SIBLING) == siblings


def test_a_layer_scale_is_no_gate() -> None:
    assert not places(roles_of("linear", "gelu", "linear", "multiply", "add", widths={0: 4, 1: 4}), SIBLING)
    assert not places(roles_of("linear", "linear", "linear", "multiply", "add", parameters={3: 1}), SIBLING)


def test_norms_that_are_written_out() -> None:
    assert places(roles_of("rms_norm", "multiply", "linear", "rms_norm", "linear"), WRITTEN_OUT) == [0]
    assert not places(roles_of("rms_norm", "multiply", parameters={0: 1}), WRITTEN_OUT)  # fused, and then a gate
    assert not places(roles_of("rms_norm", "multiply", widths={1: 4}), WRITTEN_OUT)


def test_one_projection_for_all_three_is_kept() -> None:
    assert places(roles_of("layer_norm", "linear", *ROTATED, *ROTATED, "attention"), PASSED_ON) == [4, 9]


@pytest.mark.parametrize(
    "kinds",
    [
        *(("linear", "multiply", "add"), ("concatenate", "conv2d", "add"), ("concatenate", "multiply", "linear")),
        *(("conv2d", "concatenate", "multiply", "add"), ("multiply", "relu", "conv2d", "concatenate", "multiply", "add")),
    ],
)
def test_other_products_are_no_rotations(kinds: tuple[str, ...]) -> None:
    assert not places(roles_of(*kinds), CONSTANT | PASSED_ON | INNER_SUM)


def test_scores_and_their_masks_end_no_block() -> None:
    masked = ("linear", "matmul", "multiply", "add", "add", "softmax", "matmul", "linear", "add")  # scaled, by place, by window
    roles = roles_of(*masked, *FEED_FORWARD, *masked, *FEED_FORWARD)
    assert places(roles, INNER_SUM) == [3, 4, 16, 17]
    assert places(roles, CONSTANT) == [2, 15]
    assert places(roles, BLOCK_BEGIN) == [0, 13]
    assert places(roles_of("matmul", "multiply", "softmax"), CONSTANT) == [1]


@pytest.mark.parametrize(
    ("kinds", "begins", "inside"),
    [
        ((*ATTENDS, *FEED_FORWARD, *ATTENDS, *FEED_FORWARD, "linear"), [0, 8], 16),
        ((*ATTENDS, *ATTENDS, *FEED_FORWARD, *ATTENDS, *ATTENDS, *FEED_FORWARD), [0, 12], 24),  # a decoder that looks twice
        ((*ATTENDS, *ATTENDS, "linear"), [0, 4], 8),  # attention alone
        (("conv2d", "add", "conv2d", "relu", "add", "adaptive_avg_pool", "linear"), [0, 2], 5),
        (("linear", "relu", "linear", "relu", "linear"), [0, 2, 4], 4),  # nothing residual: each linear layer begins one
        (("embedding", "relu"), [0], 0),
    ],
)
def test_blocks_end_with_residual_sums(kinds: tuple[str, ...], begins: list[int], inside: int) -> None:
    roles = roles_of(*kinds)
    assert places(roles, BLOCK_BEGIN) == begins
    assert places(roles, IN_BLOCK) == list(range(inside))


def test_identities_are_as_if_they_were_not_there() -> None:
    plain, padded = ("linear", *ROTATED, "attention", "add"), ("linear", *(k for kind in ROTATED for k in ("identity", kind)))
    padded = (*padded, "attention", "identity", "add")
    assert [role for role, kind in zip(roles_of(*padded), padded, strict=True) if kind != "identity"] == roles_of(*plain)


TELLING = ("linear", "add", "multiply", "concatenate", "attention", "matmul", "softmax", "rms_norm", "other", "identity")


@given(st.lists(st.lists(st.sampled_from(TELLING) | st.sampled_from(KINDS), max_size=30), max_size=5))
def test_a_job_has_the_same_roles_alone_and_among_others(many: list[list[str]]) -> None:
    flat = [kind for kinds in many for kind in kinds]
    together = roles_of(*flat, counts=tuple(map(len, many)) or (0,))
    assert together == [role for kinds in many for role in (roles_of(*kinds) if kinds else [])]


@pytest.mark.parametrize(
    ("parameters", "following", "is_depthwise"),
    [
        (9 * 32, "batch_norm2d", True),
        (49 * 32 + 32, "layer_norm", True),  # ConvNeXt's, with a bias
        (9 * 16 * 32, "batch_norm2d", False),
        (25 * 32 + 32, "batch_norm2d", True),
        (24 * 32, "batch_norm2d", False),  # pointwise, of 24 channels
        (9 * 32 * 32 + 32, "batch_norm2d", False),  # 289 for each channel: 17 squared
        (9 * 32, "relu", False),  # nothing tells its channels
    ],
)
def test_a_depthwise_convolution_is_told_by_the_norm_behind_it(parameters: int, following: str, is_depthwise: bool) -> None:
    roles = roles_of("conv2d", "relu", "conv2d", following, parameters={0: 432, 2: parameters, 3: 64})
    assert places(roles, DEPTHWISE) == [2] * is_depthwise


def test_a_first_layer_or_one_with_more_to_give_is_not_depthwise() -> None:
    patches = roles_of("conv2d", "layer_norm", "relu", parameters={0: 49 * 96, 1: 192})  # ConvNeXt's stem: 4 x 4 of three, a bias
    assert places(patches, DEPTHWISE) == []
    wider = roles_of("relu", "conv2d", "batch_norm2d", widths={1: 3, 2: 3}, parameters={1: 25 * 24, 2: 48})  # 1 x 1 of 24, a bias
    assert places(wider, DEPTHWISE) == []
