"""The workspace of cuBLAS: allocated when a thread first calls cuBLAS, and kept until the process
ends.

Source: ``aten/src/ATen/cuda/CublasHandlePool.cpp``.  Each thread has one handle, with one workspace
    per stream.  So the forward
and the backward thread have one workspace each.  cuBLASLt (bias epilogues of ``addmm``) shares this
workspace unless ``TORCH_CUBLASLT_UNIFIED_WORKSPACE`` is 0; sharing is the default of torch 2.13.
Earlier versions kept a separate 1 MiB per handle (``CUBLASLT_WORKSPACE_SIZE``).  Convolutions and
attention kernels do not call cuBLAS through PyTorch.
"""

from __future__ import annotations

import re
from typing import Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.job.layers import describe
from gpumemnet.torch_private.operators import OpOverload, aten
from gpumemnet.tracing.platform import Platform

KIB: Final = 1024

BLAS_OPERATORS: Final = frozenset(
    {
        aten.mm,
        aten.addmm,
        aten._addmm_activation,
        aten.bmm,
        aten.baddbmm,
        aten.addbmm,
        aten.mv,
        aten.addmv,
        aten.dot,
        aten.vdot,
        aten._scaled_mm,
        aten._int_mm,
    }
)
"""Operators that use cuBLAS."""

_SETTING: Final = re.compile(r":([0-9]+):([0-9]+)")


def blas_workspace(operator: OpOverload, platform: Platform) -> int | None:
    """Return the bytes that a thread keeps after it first calls ``operator``; ``None`` if that does
    not use cuBLAS."""
    return (
        platform.device.blas_workspace_bytes if operator.overloadpacket in BLAS_OPERATORS else None
    )


def parse_workspace_setting(text: str) -> int:
    """Return the bytes that ``CUBLAS_WORKSPACE_CONFIG`` requests, such as ``:4096:2:16:8`` (pairs
    of KiB and count).

    To trace a job that uses this setting:
    ``dataclasses.replace(profile, blas_workspace_bytes=parse_workspace_setting(":4096:8"))``.

    Raises:
        InvalidRequestError: the text has no such pair.
    """
    pairs = _SETTING.findall(text)
    if not pairs:
        raise InvalidRequestError(
            f"must be pairs of KiB and count such as ':4096:8', not {describe(text)}",
            "CUBLAS_WORKSPACE_CONFIG",
        )
    return sum(int(size) * int(count) for size, count in pairs) * KIB
