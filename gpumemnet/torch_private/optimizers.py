"""Private names of ``torch.optim``: for which devices foreach and fused implementations are chosen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from gpumemnet.torch_private.names import TorchName, check, declare, replaced

_MODULES: Final = ("torch.optim.optimizer", "torch.utils._foreach_utils")
_FUNCTIONS: Final = ("_get_foreach_kernels_supported_devices", "_get_fused_kernels_supported_devices")


def _devices_probe(path: str) -> Callable[[], None]:
    def probe() -> None:
        devices = TorchName(path, "be probed").value()()
        check(isinstance(devices, list) and "cuda" in devices, f"it returns {devices!r}, not a list of devices with cuda")

    return probe


_SUPPORTED: Final = tuple(
    declare(path, "let optimizers choose the implementation that they choose on a GPU", probe=_devices_probe(path))
    for module in _MODULES
    for function in _FUNCTIONS
    for path in (f"{module}:{function}",)
)


def gpu_optimizers() -> AbstractContextManager[None]:
    """Context in which optimizers treat meta parameters as CUDA's: foreach by default, fused where asked for."""

    def with_meta(original: Callable[[], list[str]]) -> Callable[[], list[str]]:
        return lambda: [*original(), "cuda", "meta"]

    return replaced((name, with_meta(name.value())) for name in _SUPPORTED)
