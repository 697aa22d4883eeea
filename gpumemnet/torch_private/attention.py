"""Private names of scaled-dot-product attention: in which order PyTorch tries its kernels."""

from __future__ import annotations

from typing import Any, Final

import torch

from gpumemnet.torch_private.names import check, declare

SDP_BACKENDS: Final = {0: "math", 1: "flash", 2: "memory_efficient", 3: "cudnn"}
"""Number in ``at::SDPBackend`` → name of the kernel."""


def kernel_order() -> tuple[str, ...]:
    """The kernels in the order in which PyTorch tries them."""
    return tuple(
        SDP_BACKENDS[number]
        for number in torch._C._get_sdp_priority_order()
        if number in SDP_BACKENDS
    )


def enabled_kernels() -> frozenset[str]:
    """The kernels that are switched on: users switch them in their code, even around single
    calls."""
    cuda: Any = torch.backends.cuda
    switches = {
        "flash": cuda.flash_sdp_enabled,
        "memory_efficient": cuda.mem_efficient_sdp_enabled,
        "cudnn": cuda.cudnn_sdp_enabled,
        "math": cuda.math_sdp_enabled,
    }
    return frozenset(name for name, is_enabled in switches.items() if is_enabled())


def _probe() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels: Any = (
        SDPBackend.MATH,
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    )
    check(
        [int(kernel) for kernel in kernels] == list(SDP_BACKENDS), "the kernels have other numbers"
    )
    check(
        set(kernel_order()) == set(SDP_BACKENDS.values()),
        f"the order of kernels is {kernel_order()}",
    )
    with sdpa_kernel([SDPBackend.MATH]):
        check(
            enabled_kernels() == {"math"},
            f"with the math kernel alone, {sorted(enabled_kernels())} are switched on",
        )


declare(
    "torch._C:_get_sdp_priority_order",
    "choose the attention kernel that PyTorch would choose",
    probe=_probe,
)
