from dataclasses import replace
from typing import Any

import pytest

from gpumemnet.physics.attention_kernels import (
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
        (AMPERE, "float32", "memory_efficient"),
        (AMPERE, "float64", "math"),
        (HOPPER, "bfloat16", "cudnn"),
        (BLACKWELL, "float16", "cudnn"),
        (CONSUMER_BLACKWELL, "bfloat16", "flash"),
        (TURING, "float16", "memory_efficient"),
        (TURING, "bfloat16", "math"),
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
        (18, AMPERE, {"dtype": "float32"}, "math"),
        (18, VOLTA, {"dtype": "float32"}, "memory_efficient"),  # no tensor cores, no alignment
        (200, ADA, {}, "memory_efficient"),
        (200, ADA, {"requires_grad": False}, "flash"),
        (256, ADA, {}, "flash"),
        (256, ADA, {"dropout": 0.1}, "memory_efficient"),
        (256, HOPPER, {}, "cudnn"),
        (256, BLACKWELL, {}, "flash"),  # cuDNN takes 128 there
    ],
)
def test_head_size_decides(
    head_size: int, capability: tuple[int, int], changes: dict[str, Any], kernel: str
) -> None:
    assert (
        choose_kernel(replace(call(shape=(2, 4, 16, head_size)), **changes), setup(capability))
        == kernel
    )


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


@pytest.mark.parametrize(("dropout", "kernel"), [(0.0, "cudnn"), (0.125, "cudnn"), (0.1, "flash")])
def test_cudnn_drops_in_sixteenths(dropout: float, kernel: str) -> None:
    assert choose_kernel(call(dropout=dropout), setup(HOPPER)) == kernel


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


def test_an_order_of_the_users_own_stands() -> None:
    assert (
        choose_kernel(call(), setup(HOPPER, order=("memory_efficient", "flash", "math", "cudnn")))
        == "memory_efficient"
    )


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
