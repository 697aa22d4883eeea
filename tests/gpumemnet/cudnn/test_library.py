"""The real cuDNN, where it is installed: CI does not install it, because its wheels take 1.5 GB; and
the stand-in for the CUDA driver that it is linked to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpumemnet.cudnn.execution_plans import (
    BACKWARD_DATA,
    BACKWARD_FILTER,
    FORWARD,
    OPERATIONS,
    ConvolutionQuestion,
)
from gpumemnet.cudnn.library import DRIVER_FUNCTIONS, DRIVER_NAME, strides
from gpumemnet.cudnn.session import CudnnSession, open_session
from gpumemnet.gpu import device_profile
from gpumemnet.units import MIB


@pytest.fixture
def cudnn() -> Iterator[CudnnSession]:
    session, reason = open_session(os.environ.get("CUDNN_LIBRARY", "auto"))
    if session is None:
        pytest.skip(f"{reason or 'cuDNN is not installed'}: its plans cannot be listed")
    yield session
    session.close()


def question(operation: str, dtype: str, channels_last: bool) -> ConvolutionQuestion:
    return ConvolutionQuestion(
        operation=operation,
        image=(32, 64, 56, 56),
        weight=(64, 64, 3, 3),
        result=(32, 64, 56, 56),
        channels_last=channels_last,
        dtype=dtype,
        padding=(1, 1),
        stride=(1, 1),
        dilation=(1, 1),
    )


@pytest.mark.parametrize("gpu", ["A100", "H100", "T4", "RTX4090"])
def test_half_precision_needs_no_copies_if_the_tensors_are_channels_last(
    cudnn: CudnnSession, gpu: str
) -> None:
    for operation in (FORWARD, BACKWARD_DATA):
        last, first = (
            cudnn.plans(device_profile(gpu), question(operation, "float16", each))
            for each in (True, False)
        )
        assert last is not None
        assert first is not None
        assert last.heuristic[0].workspace_bytes < MIB
        assert first.heuristic


def test_every_operation_and_type_has_plans(cudnn: CudnnSession) -> None:
    for dtype in ("float32", "float16", "bfloat16", "float64"):
        for operation in OPERATIONS:
            plans = cudnn.plans(
                device_profile("A100"), question(operation, dtype, channels_last=False)
            )
            assert plans is not None
            assert plans.for_pytorch(dtype, tf32=True)


def test_the_filter_gradient_on_an_a100_copies_both_operands(cudnn: CudnnSession) -> None:
    plans = cudnn.plans(
        device_profile("A100"), question(BACKWARD_FILTER, "float32", channels_last=False)
    )
    assert plans is not None
    assert plans.heuristic[0].workspace_bytes > 2 * 32 * 64 * 56 * 56 * 4


def test_strides_of_both_layouts() -> None:
    assert strides((2, 3, 4, 5), channels_last=False) == (60, 20, 5, 1)
    assert strides((2, 3, 4, 5), channels_last=True) == (60, 1, 15, 3)


def test_the_stand_in_for_the_driver_is_a_library_whose_functions_return_zero() -> None:
    program = (
        "import ctypes; from gpumemnet.cudnn.library import *; load_driver_stand_in();"
        f"driver = ctypes.CDLL({DRIVER_NAME!r});"
        f"print([driver[name]() for name in {DRIVER_FUNCTIONS!r}], hasattr(driver, 'cuInit'))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout == f"{[0] * len(DRIVER_FUNCTIONS)} False\n"
