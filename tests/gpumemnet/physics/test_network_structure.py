"""Roles that follow from the order of layers: rotations, inner sums, blocks."""

from __future__ import annotations

import pytest

from gpumemnet.job.layers import CODE_OF_KIND, UNKNOWN
from gpumemnet.physics.network_structure import LAYER_KINDS, Layer, note_structure

ROTATED = ("multiply", "other", "concatenate", "multiply", "add")
FEED_FORWARD = ("linear", "relu", "linear", "add")
ATTENDS = ("linear", "attention", "linear", "add")


def with_roles(
    *kinds: str, widths: dict[int, int] | None = None, parameters: dict[int, int] | None = None
) -> list[Layer]:
    """Layers that are as wide as each other and have no parameters, except at the positions given,
    with their roles."""
    layers = []
    for position, kind in enumerate(kinds):
        layer = Layer()
        layer.describe(
            LAYER_KINDS[CODE_OF_KIND[kind]],
            (widths or {}).get(position, 1),
            (parameters or {}).get(position, 0),
            UNKNOWN,
            UNKNOWN,
        )
        layers.append(layer)
    note_structure(layers)
    return layers


def positions(layers: list[Layer], role: str) -> list[int]:
    return [position for position, layer in enumerate(layers) if getattr(layer, role)]


def test_queries_and_keys_are_rotated() -> None:
    kinds = (
        "rms_norm",
        "linear",
        "linear",
        "linear",
        *ROTATED,
        *ROTATED,
        "attention",
        "linear",
        "add",
        *FEED_FORWARD,
    )
    layers = with_roles(*kinds)
    assert positions(layers, "is_constant_product") == [4, 7, 9, 12]
    assert positions(layers, "is_inner_sum") == [8, 13]
    # Queries and keys, and the exchanged halves; attention keeps the values.
    assert positions(layers, "is_passed_on") == [1, 2, 6, 11]
    assert positions(layers, "begins_block") == [0]
    assert positions(layers, "is_in_block") == list(range(len(kinds)))


@pytest.mark.parametrize(
    ("kinds", "siblings"),
    [
        (("rms_norm", "linear", "linear", "linear", *ROTATED, *ROTATED, "attention"), [2, 3]),
        (("linear", "linear", "linear", "attention", "linear", "add"), [1, 2]),
        (
            ("linear", "linear", "linear", "linear", "matmul", "softmax", "matmul", "linear"),
            [2, 3],
        ),  # one before the three
        (("linear", "silu", "linear", "multiply", "linear"), [2]),  # a gate
        (("linear", "attention", "linear", "relu", "linear", "linear"), []),
    ],
)
def test_projections_of_the_same_input(kinds: tuple[str, ...], siblings: list[int]) -> None:
    assert positions(with_roles(*kinds), "is_sibling") == siblings


def test_norms_that_are_written_out() -> None:
    assert positions(
        with_roles("rms_norm", "multiply", "linear", "rms_norm", "linear"), "is_decomposed_norm"
    ) == [0]
    assert not positions(
        with_roles("rms_norm", "multiply", parameters={0: 1}), "is_decomposed_norm"
    )  # fused, and then a gate
    assert not positions(with_roles("rms_norm", "multiply", widths={1: 4}), "is_decomposed_norm")


@pytest.mark.parametrize(
    "kinds",
    [
        ("linear", "multiply", "add"),
        ("conv2d", "concatenate", "multiply", "add"),
        ("multiply", "relu", "conv2d", "concatenate", "multiply", "add"),
    ],
)
def test_other_products_are_no_rotations(kinds: tuple[str, ...]) -> None:
    layers = with_roles(*kinds)
    assert not any(
        positions(layers, role) for role in ("is_constant_product", "is_passed_on", "is_inner_sum")
    )


def test_scores_and_their_masks_end_no_block() -> None:
    masked = (
        "linear",
        "matmul",
        "multiply",
        "add",
        "add",
        "softmax",
        "matmul",
        "linear",
        "add",
    )  # scaled, with a position bias and a window mask
    layers = with_roles(*masked, *FEED_FORWARD, *masked, *FEED_FORWARD)
    assert positions(layers, "is_inner_sum") == [3, 4, 16, 17]
    assert positions(layers, "is_constant_product") == [2, 15]
    assert positions(layers, "begins_block") == [0, 13]
    assert positions(with_roles("matmul", "multiply", "softmax"), "is_constant_product") == [1]


@pytest.mark.parametrize(
    ("kinds", "begins", "inside"),
    [
        ((*ATTENDS, *FEED_FORWARD, *ATTENDS, *FEED_FORWARD, "linear"), [0, 8], 16),
        (
            (*ATTENDS, *ATTENDS, *FEED_FORWARD, *ATTENDS, *ATTENDS, *FEED_FORWARD),
            [0, 12],
            24,
        ),  # a decoder that looks twice
        (("conv2d", "add", "conv2d", "relu", "add", "adaptive_avg_pool", "linear"), [0, 2], 5),
        (
            ("linear", "relu", "linear", "relu", "linear"),
            [0, 2, 4],
            4,
        ),  # nothing residual: each linear layer begins one
        (("embedding", "relu"), [0], 0),
    ],
)
def test_blocks_end_with_residual_sums(
    kinds: tuple[str, ...], begins: list[int], inside: int
) -> None:
    layers = with_roles(*kinds)
    assert positions(layers, "begins_block") == begins
    assert positions(layers, "is_in_block") == list(range(inside))


@pytest.mark.parametrize(
    ("parameters", "following", "is_depthwise"),
    [
        (9 * 32, "batch_norm2d", True),
        (49 * 32 + 32, "layer_norm", True),  # ConvNeXt's, with a bias
        (9 * 16 * 32, "batch_norm2d", False),
        (24 * 32, "batch_norm2d", False),  # pointwise, of 24 channels
        (9 * 32, "relu", False),  # its channels are unknown
    ],
)
def test_a_depthwise_convolution_is_recognised_by_the_norm_behind_it(
    parameters: int, following: str, is_depthwise: bool
) -> None:
    layers = with_roles(
        "conv2d", "relu", "conv2d", following, parameters={0: 432, 2: parameters, 3: 64}
    )
    assert positions(layers, "is_depthwise") == [2] * is_depthwise


@pytest.mark.parametrize(
    ("kinds", "passed_on"),
    [
        # ResNet: the projection beside a block reads the block's input, not the norm before it.
        (("relu", "conv2d", "batch_norm2d", "conv2d", "batch_norm2d", "add", "relu"), [2]),
        # RepVGG: three branches read the same input.
        (
            (
                "relu",
                "batch_norm2d",
                "conv2d",
                "batch_norm2d",
                "conv2d",
                "batch_norm2d",
                "add",
                "add",
                "relu",
            ),
            [1, 3],
        ),
        # A linear bottleneck is read by the next convolution.
        (
            (
                "relu",
                "conv2d",
                "batch_norm2d",
                "conv2d",
                "batch_norm2d",
                "relu",
                "conv2d",
                "batch_norm2d",
                "add",
            ),
            [],
        ),
        # MobileOne: the sum of branches begins with a number.
        (
            (
                "relu",
                "batch_norm2d",
                "conv2d",
                "batch_norm2d",
                "other",
                "conv2d",
                "batch_norm2d",
                "add",
                "add",
                "relu",
            ),
            [1, 4],
        ),
        # RepGhost: a norm of another branch's input.
        (("conv2d", "batch_norm2d", "batch_norm2d", "add", "relu"), [1]),
        # MixNet: convolutions of parts of one tensor.
        (("relu", "conv2d", "conv2d", "concatenate", "batch_norm2d"), []),
    ],
)
def test_a_branch_does_not_read_the_end_of_the_branch_before_it(
    kinds: tuple[str, ...], passed_on: list[int]
) -> None:
    assert positions(with_roles(*kinds), "is_passed_on") == passed_on


def test_parts_of_a_split_convolution_do_not_read_each_other() -> None:
    layers = with_roles(
        *("relu", "conv2d", "conv2d", "concatenate", "batch_norm2d"), widths={0: 2, 3: 2, 4: 2}
    )
    assert positions(layers, "is_passed_on") == [1, 2]


@pytest.mark.parametrize(("parameters", "passed_on"), [(4 * 16, [1]), (16 * 16, [])])
def test_a_projection_does_not_read_what_squeeze_and_excitation_made(
    parameters: int, passed_on: list[int]
) -> None:
    """The projection of a residual block has fewer channels than the product; a convolution of a
    block without projection has as many."""
    kinds = ("sigmoid", "multiply", "conv2d", "batch_norm2d", "add")
    layers = with_roles(*kinds, widths={0: 0}, parameters={2: parameters, 3: 2 * 16})
    assert positions(layers, "is_passed_on") == passed_on


def test_the_projection_of_a_block_with_early_activations_is_not_read_by_the_other_branch() -> None:
    kinds = ("relu", "conv2d", "conv2d", "batch_norm2d", "relu")
    layers = with_roles(
        *kinds, widths={0: 64, 1: 256, 2: 64, 3: 64, 4: 64}, parameters={1: 1024, 2: 256, 3: 32}
    )
    assert positions(layers, "is_passed_on") == [1]


@pytest.mark.parametrize(
    ("kinds", "written_out", "read_later"),
    [
        # queries are scaled: keys and values stay in the projection
        (("linear", "other", "matmul", "softmax", "matmul"), [2, 3, 4], [0]),
        # scores are scaled and masked
        (("linear", "matmul", "multiply", "add", "softmax", "dropout"), [1, 4, 5], []),
        # the math kernel's steps
        (("linear", "matmul", "softmax", "dropout", "matmul"), [], []),
    ],
)
def test_attention_that_is_written_out(
    kinds: tuple[str, ...], written_out: list[int], read_later: list[int]
) -> None:
    layers = with_roles(*kinds, widths={0: 3})
    assert positions(layers, "is_written_out") == written_out
    assert positions(layers, "is_read_later") == read_later
