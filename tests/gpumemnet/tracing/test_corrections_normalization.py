import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.gpumemnet.tracing.corrected import meta, operators, saved

HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_batch_norm_is_cudnns_and_keeps_float32_statistics(dtype: torch.dtype) -> None:
    layer = nn.BatchNorm2d(8, device="meta")
    name = str(dtype).removeprefix("torch.")
    # cudnn_batch_norm: input, weight, running_mean, running_var, result1, result2, result3 (the
    # reserve space)
    expected = {f"{name}[4, 8, 5, 5]": 1, "float32[8]": 5, "uint8[0]": 1}
    assert saved(lambda: layer(meta(4, 8, 5, 5, dtype=dtype))) == expected


@pytest.mark.parametrize(
    ("layer", "shape", "dtype"),
    [
        (lambda: nn.BatchNorm2d(8, device="meta"), (4, 8, 5, 5), BRAIN),
        (lambda: nn.BatchNorm2d(8, device="meta", dtype=HALF), (4, 8, 5, 5), HALF),
        (lambda: nn.BatchNorm2d(8, affine=False, device="meta"), (4, 8, 5, 5), torch.float32),
        (lambda: nn.BatchNorm1d(8, device="meta"), (4, 8), torch.float32),
    ],
)
def test_what_cudnn_refuses_runs_natively(
    layer: object, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert callable(layer)
    counts = operators(lambda: layer()(meta(*shape, dtype=dtype)))
    assert (counts["native_batch_norm"], counts["cudnn_batch_norm"]) == (1, 0)


def test_the_native_batch_norm_keeps_float32_statistics() -> None:
    layer = nn.BatchNorm2d(8, device="meta", dtype=HALF)
    found = saved(lambda: layer(meta(4, 8, 5, 5, dtype=HALF)))
    assert found == {"float16[4, 8, 5, 5]": 1, "float16[8]": 3, "float32[8]": 2}


def test_cudnn_switched_off_leaves_batch_norm_native() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        assert (
            operators(lambda: nn.BatchNorm2d(8, device="meta")(meta(4, 8, 5, 5)))[
                "native_batch_norm"
            ]
            == 1
        )


def test_cudnn_copies_an_input_with_gaps() -> None:
    layer = nn.BatchNorm1d(8, device="meta")
    counts = operators(lambda: layer(meta(4, 5, 8).transpose(1, 2)))
    assert counts["cudnn_batch_norm"] == 1
    assert counts["clone"] == 2  # the input, and the gradient, which is expanded from a scalar


def test_layer_norm_keeps_float32_statistics() -> None:
    layer = nn.LayerNorm(8, device="meta", dtype=HALF)
    # native_layer_norm: input, weight, bias, mean, rstd
    assert saved(lambda: layer(meta(4, 8, dtype=HALF))) == {
        "float16[4, 8]": 1,
        "float16[8]": 2,
        "float32[4, 1]": 2,
    }


def test_group_norm_keeps_statistics_of_its_parameters_type() -> None:
    # native_group_norm_cuda: param_scalar_type
    layer = nn.GroupNorm(2, 8, device="meta", dtype=HALF)
    assert saved(lambda: layer(meta(4, 8, 5, 5, dtype=HALF)))["float16[4, 2]"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, HALF, BRAIN])
def test_rms_norm_keeps_input_weight_and_one_value_per_row(dtype: torch.dtype) -> None:
    layer = nn.RMSNorm(8, device="meta", dtype=dtype)
    name = str(dtype).removeprefix("torch.")
    expected = {f"{name}[4, 8]": 1, f"{name}[8]": 1, "float32[4, 1]": 1}
    assert saved(lambda: layer(meta(4, 8, dtype=dtype))) == expected
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == dtype


def test_rms_norm_without_weight() -> None:
    assert saved(lambda: F.rms_norm(meta(4, 8), (8,))) == {"float32[4, 8]": 1, "float32[4, 1]": 1}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_rms_norm_of_mixed_types_is_not_fused() -> None:
    layer = nn.RMSNorm(8, device="meta")
    assert operators(lambda: layer(meta(4, 8, dtype=HALF)))["_fused_rms_norm"] == 0


def test_rms_norm_with_a_frozen_weight() -> None:
    layer = nn.RMSNorm(8, device="meta").requires_grad_(False)
    saved(lambda: layer(meta(4, 8)))
    assert layer.weight.grad is None


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_softmax_casts_float16_inside(function: object) -> None:
    def run() -> Tensor:
        assert callable(function)
        output: Tensor = function(meta(4, 8, dtype=HALF), -1, dtype=torch.float32)
        return output

    assert operators(run)["_to_copy"] == 0
    assert saved(run) == {"float32[4, 8]": 1}


def test_softmax_casts_bfloat16_before() -> None:
    assert (
        operators(lambda: F.softmax(meta(4, 8, dtype=BRAIN), -1, dtype=torch.float32))["_to_copy"]
        == 2
    )
