import pytest
import torch
import torch.nn.functional as F

from tests.gpumemnet.tracing.corrected import meta, saved


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dropout_keeps_a_mask_of_one_byte(dtype: torch.dtype) -> None:
    # native_dropout in derivatives.yaml saves result1, the mask
    assert saved(lambda: F.dropout(meta(4, 5, dtype=dtype), 0.1)) == {"bool[4, 5]": 1}


def test_the_in_place_form_keeps_noise() -> None:
    # dropout_ is the composite on every device: noise of the input's type, saved by mul_
    assert saved(lambda: F.dropout(meta(4, 5) * 1, 0.1, inplace=True)) == {"float32[4, 5]": 1}


def test_without_training_nothing_is_saved() -> None:
    assert saved(lambda: F.dropout(meta(4, 5), 0.1, training=False)) == {}


def test_feature_dropout_keeps_one_value_per_channel() -> None:
    assert saved(lambda: F.dropout2d(meta(2, 3, 4, 4), 0.1)) == {"float32[2, 3, 1, 1]": 1}
