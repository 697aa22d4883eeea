"""Private names of ``torch.optim``: for which devices foreach and fused implementations are chosen,
and LBFGS's history."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

import torch
from torch.optim import LBFGS

from gpumemnet.torch_private.names import SCRIPT, TorchName, check, declare, replaced

_MODULES: Final = ("torch.optim.optimizer", "torch.utils._foreach_utils")
_FUNCTIONS: Final = (
    "_get_foreach_kernels_supported_devices",
    "_get_fused_kernels_supported_devices",
)


def _devices_probe(path: str) -> Callable[[], None]:
    def probe() -> None:
        devices = TorchName(path, "be probed").value()()
        check(
            isinstance(devices, list) and "cuda" in devices,
            f"it returns {devices!r}, not a list of devices with cuda",
        )

    return probe


_SUPPORTED: Final = tuple(
    declare(
        path,
        "let optimizers choose the implementation that they choose on a GPU",
        probe=_devices_probe(path),
    )
    for module in _MODULES
    for function in _FUNCTIONS
    for path in (f"{module}:{function}",)
)


def gpu_optimizers() -> AbstractContextManager[None]:
    """Context in which optimizers treat meta parameters as CUDA's: foreach by default, fused where
    asked for."""

    def with_meta(original: Callable[[], list[str]]) -> Callable[[], list[str]]:
        return lambda: [*original(), "cuda", "meta"]

    return replaced((name, with_meta(name.value())) for name in _SUPPORTED)


def fill_history(optimizer: LBFGS) -> None:
    """Give ``optimizer``, which has made a step, as many past updates as it keeps at most."""
    group = optimizer.param_groups[0]
    state = optimizer.state[group["params"][0]]
    missing = group["history_size"] - len(state["old_dirs"])
    state["old_dirs"] += [torch.empty_like(state["d"]) for _ in range(missing)]
    state["old_stps"] += [torch.empty_like(state["d"]) for _ in range(missing)]
    state["ro"] += [state["d"].new_empty(()) for _ in range(missing)]


def _probe_history() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = LBFGS([weight], lr=0.1, max_iter=3, max_eval=9, history_size=5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**4).sum()
        torch.autograd.backward(loss)
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    state = optimizer.state[weight]
    lengths = {name: len(state[name]) for name in ("old_dirs", "old_stps", "ro")}
    check(
        set(lengths.values()) == {2},
        f"after three iterations the history of LBFGS is {lengths}, not of two updates",
    )
    check(
        state["old_dirs"][0].shape == state["d"].shape,
        "the history of LBFGS has another shape than its direction",
    )


declare("torch.optim:LBFGS", "know the history that LBFGS keeps", use=SCRIPT, probe=_probe_history)
