from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpumemnet.errors import InvalidRequestError
from tests.gpumemnet.tracing.corrected import meta, operators, saved

HALF = torch.float16


def attention(
    *shape: int, dtype: torch.dtype = torch.float32, mask: Tensor | None = None, **options: Any
) -> Tensor:
    query, key, value = (meta(*shape, dtype=dtype) for _ in range(3))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def test_flash_saves_inputs_output_and_row_sums() -> None:
    # _scaled_dot_product_flash_attention: query, key, value, output, logsumexp, rng_state, unused
    found = saved(lambda: attention(2, 3, 40, 16, dtype=HALF, dropout_p=0.1, is_causal=True))
    assert found == {
        "float16[2, 3, 40, 16]": 4,
        "float32[2, 3, 40]": 1,
        "uint64[2]": 1,
        "uint64[]": 1,
    }


def test_the_efficient_kernel_pads_its_row_sums_to_32() -> None:
    found = saved(lambda: attention(2, 3, 40, 16))
    assert found == {"float32[2, 3, 40, 16]": 4, "float32[2, 3, 64]": 1, "int64[]": 2}


def test_flash_works_on_heads_padded_to_eight() -> None:
    counts = operators(lambda: attention(2, 3, 40, 20, dtype=HALF))
    assert counts["constant_pad_nd"] == 6  # three there, three gradients back
    assert saved(lambda: attention(2, 3, 40, 20, dtype=HALF))["float16[2, 3, 40, 24]"] == 4


def test_a_bool_mask_becomes_an_aligned_bias() -> None:
    # rows of 42 elements are padded to 48; what is saved is the bias, expanded
    mask = meta(40, 42, dtype=torch.bool, requires_grad=False)
    key = meta(2, 3, 42, 16)
    run = lambda: F.scaled_dot_product_attention(meta(2, 3, 40, 16), key, key, attn_mask=mask)  # noqa: E731
    assert saved(run) == {
        "float32[2, 3, 40, 16]": 2,
        "float32[2, 3, 42, 16]": 2,
        "float32[2, 3, 40, 42]": 1,
    } | {
        "float32[2, 3, 64]": 1,
        "int64[]": 2,
    }
    assert operators(run)["constant_pad_nd"] == 1


def test_a_learned_bias_gets_its_gradient() -> None:
    bias = meta(1, 3, 40, 40)
    saved(lambda: attention(2, 3, 40, 16, mask=bias))
    assert bias.grad is not None
    assert bias.grad.shape == bias.shape


def test_cudnn_takes_the_mask_unexpanded() -> None:
    mask = meta(40, 40, dtype=torch.bool, requires_grad=False)
    assert (
        saved(lambda: attention(2, 3, 40, 16, dtype=HALF, mask=mask), "H200")["float16[40, 40]"]
        == 1
    )


def test_the_math_kernel_computes_half_precision_in_float32() -> None:
    with sdpa_kernel([SDPBackend.MATH]):
        found = saved(lambda: attention(2, 3, 40, 16, dtype=HALF, dropout_p=0.1))
    # scaled query and key, value; softmax, the mask of its dropout, and what dropout made of it
    assert found == {
        "float32[6, 40, 16]": 2,
        "float32[6, 16, 40]": 1,
        "float32[2, 3, 40, 40]": 1,
    } | {
        "bool[2, 3, 40, 40]": 1,
        "float32[6, 40, 40]": 1,
    }


def test_the_math_kernel_adds_its_mask_in_place() -> None:
    counts = operators(lambda: attention(2, 3, 40, 18, mask=meta(40, 40, requires_grad=False)))
    assert (counts["add_"], counts["add"]) == (1, 0)


def test_grouped_queries_save_the_few_heads() -> None:
    key = meta(2, 2, 40, 16, dtype=HALF)
    query = meta(2, 4, 40, 16, dtype=HALF)
    found = saved(lambda: F.scaled_dot_product_attention(query, key, key, enable_gqa=True))
    assert found["float16[2, 2, 40, 16]"] == 2


@pytest.mark.parametrize(
    ("backend", "operator"),
    [
        (SDPBackend.EFFICIENT_ATTENTION, "_scaled_dot_product_efficient_attention"),
        (SDPBackend.CUDNN_ATTENTION, "_scaled_dot_product_cudnn_attention"),
        (SDPBackend.FLASH_ATTENTION, "_scaled_dot_product_flash_attention"),
        (SDPBackend.MATH, "_safe_softmax"),
    ],
)
def test_the_users_own_choice_stands(backend: SDPBackend, operator: str) -> None:
    with sdpa_kernel([backend]):
        assert operators(lambda: attention(2, 3, 40, 16, dtype=HALF))[operator] == 1


def test_where_no_kernel_is_left_it_raises_as_pytorch_does() -> None:
    with (
        sdpa_kernel([SDPBackend.FLASH_ATTENTION]),
        pytest.raises(
            RuntimeError,
            match=r"No available kernel for attention of float32 queries \[2, 3, 40, 16\]",
        ),
    ):
        saved(lambda: attention(2, 3, 40, 16))


@pytest.mark.parametrize("kernel", ["flash", "memory_efficient", "cudnn", "math"])
def test_the_platform_can_force_a_kernel(kernel: str) -> None:
    counts = operators(lambda: attention(2, 3, 40, 16, dtype=HALF), attention_kernel=kernel)
    name = kernel.removeprefix("memory_")
    operator = "_safe_softmax" if kernel == "math" else f"_scaled_dot_product_{name}_attention"
    assert counts[operator] == 1


def test_a_forced_kernel_that_cannot_run_is_an_error_of_one_sentence() -> None:
    message = (
        "attention_kernel: the flash kernel cannot run attention of float32 queries [2, 3, 40, 16] and keys [2, 3, 40, 16] "
        "on NVIDIA A100-SXM4-40GB: query, key and value must all be bfloat16 or float16"
    )
    with pytest.raises(InvalidRequestError) as caught:
        saved(lambda: attention(2, 3, 40, 16), attention_kernel="flash")
    assert str(caught.value) == message


def test_multi_head_attention_without_weights_runs_the_kernel() -> None:
    layer = nn.MultiheadAttention(32, 2, dropout=0.1, batch_first=True, device="meta")
    x = meta(2, 40, 32)
    found = saved(lambda: layer(x, x, x, need_weights=False)[0])
    assert found["float32[2, 2, 64]"] == 1
    assert not any("40, 40" in name for name in found)


def test_multi_head_attention_with_weights_keeps_scores_and_a_mask() -> None:
    layer = nn.MultiheadAttention(32, 2, dropout=0.1, batch_first=True, device="meta")
    x = meta(2, 40, 32)
    found = saved(lambda: layer(x, x, x)[0])
    # softmax's result, dropout's mask, and dropout's result for the product with the values
    assert {name: count for name, count in found.items() if "40, 40" in name} == {
        "float32[4, 40, 40]": 2,
        "bool[4, 40, 40]": 1,
    }


def test_an_encoder_layer_in_training_takes_no_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, device="meta")
    counts = operators(lambda: layer(meta(2, 40, 32)))
    assert counts["_scaled_dot_product_efficient_attention"] == 1
    assert counts["native_dropout"] == 3
    assert counts["_transformer_encoder_layer_fwd"] == 0
