from dataclasses import replace
from typing import Any

import pytest

from gpumemnet.job.training_job import ATTENTION_KERNELS
from gpumemnet.physics.attention_kernels import (
    DEFAULT_ORDER,
    KERNELS,
    AttentionCall,
    AttentionSetup,
    Mask,
    choose_kernel,
    obstacle,
)

SHAPE = (8, 12, 1024, 64)
AMPERE, ADA, HOPPER, BLACKWELL, CONSUMER_BLACKWELL, TURING, VOLTA = (
    (8, 0),
    (8, 9),
    (9, 0),
    (10, 0),
    (12, 0),
    (7, 5),
    (7, 0),
)


def call(dtype: str = "bfloat16", shape: tuple[int, ...] = SHAPE, **changes: Any) -> AttentionCall:
    return replace(AttentionCall(query=shape, key=shape, value=shape, dtype=dtype), **changes)


def setup(capability: tuple[int, int] = AMPERE, **changes: Any) -> AttentionSetup:
    return replace(AttentionSetup(compute_capability=capability), **changes)


def mask(*shape: int, **facts: bool) -> Mask:
    return Mask(shape=shape, **facts)


@pytest.mark.parametrize(
    ("capability", "dtype", "kernel"),
    [
        (AMPERE, "bfloat16", "flash"),
        (AMPERE, "float16", "flash"),
        (AMPERE, "float32", "memory_efficient"),
        (AMPERE, "float64", "math"),
        (ADA, "bfloat16", "flash"),
        (HOPPER, "bfloat16", "cudnn"),
        (HOPPER, "float32", "memory_efficient"),
        (BLACKWELL, "float16", "cudnn"),
        ((10, 3), "float16", "cudnn"),
        (CONSUMER_BLACKWELL, "bfloat16", "flash"),
        (TURING, "float16", "memory_efficient"),
        (TURING, "bfloat16", "math"),
        (VOLTA, "float32", "memory_efficient"),
        ((5, 0), "float16", "memory_efficient"),
    ],
)
def test_type_and_gpu_decide(capability: tuple[int, int], dtype: str, kernel: str) -> None:
    assert choose_kernel(call(dtype), setup(capability)) == kernel


@pytest.mark.parametrize(
    ("head_size", "capability", "changes", "kernel"),
    [
        (256, AMPERE, {}, "flash"),
        (264, AMPERE, {}, "memory_efficient"),
        (20, AMPERE, {}, "flash"),  # padded to 24
        (20, AMPERE, {"dtype": "float32"}, "memory_efficient"),  # a multiple of 4
        (18, AMPERE, {"dtype": "float32"}, "math"),
        (18, VOLTA, {"dtype": "float32"}, "memory_efficient"),  # no tensor cores, no alignment
        (20, VOLTA, {"dtype": "float16"}, "math"),
        (200, ADA, {}, "memory_efficient"),
        (200, ADA, {"requires_grad": False}, "flash"),
        (192, ADA, {}, "flash"),
        (256, ADA, {}, "flash"),
        (256, ADA, {"dropout": 0.1}, "memory_efficient"),
        (256, CONSUMER_BLACKWELL, {"dropout": 0.1}, "memory_efficient"),
        (128, HOPPER, {}, "cudnn"),
        (256, HOPPER, {}, "cudnn"),
        (256, BLACKWELL, {}, "flash"),  # cuDNN takes 128 there
        (20, HOPPER, {}, "flash"),
    ],
)
def test_head_size_decides(
    head_size: int, capability: tuple[int, int], changes: dict[str, Any], kernel: str
) -> None:
    assert (
        choose_kernel(replace(call(shape=(2, 4, 16, head_size)), **changes), setup(capability))
        == kernel
    )


def test_the_kernels_are_those_of_a_job() -> None:
    assert set(KERNELS) == set(ATTENTION_KERNELS)


def test_flash_takes_no_mask() -> None:
    assert choose_kernel(call(mask=mask(1024, 1024)), setup()) == "memory_efficient"
    assert choose_kernel(call(mask=mask(8, 1, 1024, 1024)), setup(HOPPER)) == "cudnn"


@pytest.mark.parametrize(
    "odd",
    [
        mask(8, 1024, 1024),
        mask(7, 12, 1024, 1024),
        mask(1024, 1),
        mask(1024, 1024, requires_grad=True),
    ],
)
def test_masks_that_cudnn_refuses(odd: Mask) -> None:
    kernel = (
        "cudnn" if odd.shape == (1024, 1) else "memory_efficient"
    )  # a mask of one column broadcasts
    assert choose_kernel(call(mask=odd), setup(HOPPER)) == kernel


def test_a_mask_whose_rows_have_gaps_leaves_the_math_kernel() -> None:
    assert (
        choose_kernel(call(mask=mask(1024, 1024, contiguous_rows=False)), setup(HOPPER)) == "math"
    )


def test_causal_attention_of_unequal_lengths_leaves_flash_out() -> None:
    unequal = call(key=(8, 12, 512, 64), value=(8, 12, 512, 64), is_causal=True)
    assert choose_kernel(unequal, setup()) == "memory_efficient"
    assert choose_kernel(replace(unequal, is_causal=False), setup()) == "flash"


def test_grouped_queries_need_flash_or_cudnn() -> None:
    grouped = call(key=(8, 4, 1024, 64), value=(8, 4, 1024, 64), enable_gqa=True)
    assert choose_kernel(grouped, setup()) == "flash"
    assert choose_kernel(grouped, setup(HOPPER)) == "cudnn"
    assert choose_kernel(replace(grouped, dtype="float32"), setup()) == "math"
    assert choose_kernel(replace(grouped, enable_gqa=False), setup()) == "math"
    assert (
        choose_kernel(replace(grouped, key=(8, 5, 1024, 64), value=(8, 5, 1024, 64)), setup())
        == "math"
    )


def test_heads_of_key_and_value_may_differ_for_cudnn_alone() -> None:
    uneven = call(key=(8, 4, 1024, 64), value=(8, 2, 1024, 64), enable_gqa=True)
    assert choose_kernel(uneven, setup(HOPPER)) == "cudnn"
    assert choose_kernel(uneven, setup()) == "math"


@pytest.mark.parametrize(("dropout", "kernel"), [(0.0, "cudnn"), (0.125, "cudnn"), (0.1, "flash")])
def test_cudnn_drops_in_sixteenths(dropout: float, kernel: str) -> None:
    assert choose_kernel(call(dropout=dropout), setup(HOPPER)) == kernel


def test_before_torch_2_12_cudnn_drops_anything() -> None:
    assert choose_kernel(call(dropout=0.1), setup(HOPPER, coarse_dropout=False)) == "cudnn"


@pytest.mark.parametrize(
    "changes",
    [
        {"cudnn_version": 91002},
        {"cudnn_first": False},
        {"enabled": frozenset({"flash", "math"})},
        {"deterministic": True},
    ],
)
def test_what_keeps_cudnn_from_the_front(changes: dict[str, Any]) -> None:
    assert choose_kernel(call(), setup(HOPPER, **changes)) == "flash"


def test_by_default_the_math_kernel_comes_before_cudnn() -> None:
    assert DEFAULT_ORDER.index("math") < DEFAULT_ORDER.index("cudnn")
    assert choose_kernel(call(), setup(enabled=frozenset({"math", "cudnn"}))) == "math"


def test_an_order_of_the_users_own_stands() -> None:
    assert (
        choose_kernel(call(), setup(HOPPER, order=("memory_efficient", "flash", "math", "cudnn")))
        == "memory_efficient"
    )


def test_sequences_of_length_one() -> None:
    single = call(query=(8, 12, 1, 64))
    assert choose_kernel(single, setup(HOPPER)) == "cudnn"
    assert choose_kernel(replace(single, dropout=0.125), setup(HOPPER)) == "flash"
    assert choose_kernel(call(shape=(8, 12, 1, 64)), setup(HOPPER)) == "flash"


def test_batches_of_more_than_65535_leave_cudnn_out() -> None:
    assert choose_kernel(call(shape=(65536, 1, 16, 64)), setup(HOPPER)) == "flash"


def test_where_none_can_run_there_is_none() -> None:
    assert (
        choose_kernel(call("float64"), setup(enabled=frozenset({"flash", "memory_efficient"})))
        is None
    )


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("flash", "it takes no mask"),
        ("memory_efficient", None),
        ("cudnn", "it is switched off"),
        ("math", None),
    ],
)
def test_an_obstacle_is_named(kernel: str, reason: str | None) -> None:
    assert (
        obstacle(
            kernel,
            call(mask=mask(1024, 1024)),
            setup(enabled=frozenset({"flash", "memory_efficient", "math"})),
        )
        == reason
    )
