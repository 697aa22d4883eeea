"""Transforms that earlier versions of cuDNN tried when they searched."""

from __future__ import annotations

import pytest

from gpumemnet.cudnn.execution_plans import FORWARD
from gpumemnet.units import GIB
from research.published_tables.cudnn_transforms import largest_transform_bytes
from tests.convolutions import square

TRANSFORMS = [
    ((3, 256, 324, 3, 1), 441_769_984, 441_769_984),
    ((10, 512, 486, 3, 1), 1_221_926_912, 1_221_926_912),
    ((19, 512, 486, 3, 1), 2_317_398_016, 2_310_156_288),
    ((38, 256, 16, 3, 1), 415_383_552, 276_971_520),
    ((38, 256, 256, 1, 0), 2_491_678_720, 2_491_678_720),
    ((75, 64, 64, 3, 1), 818_282_496, 818_282_496),
]


@pytest.mark.parametrize(("shape", "forward", "data"), TRANSFORMS)
def test_the_largest_transform_takes_what_cudnn_reports(
    shape: tuple[int, ...], forward: int, data: int
) -> None:
    convolution = square(*shape)
    assert largest_transform_bytes(convolution, FORWARD, 40 * GIB) == pytest.approx(
        forward, rel=0.003
    )
    assert largest_transform_bytes(convolution, "backward_data", 40 * GIB) == pytest.approx(
        data, rel=0.003
    )
    assert largest_transform_bytes(convolution, FORWARD, forward // 2) < forward // 2, (
        "what exceeds the GPU is not tried"
    )
