"""Runs code on meta tensors as on CUDA, and tells what autograd saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpumemnet.gpu import device_profile
from gpumemnet.tracing.operators.autocast import cuda_kernels
from gpumemnet.tracing.operators.rules import Platform

Saved = Counter[str]


def meta(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = True) -> Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype, requires_grad=requires_grad)


def named(tensor: Tensor) -> str:
    """Such as ``float32[2, 3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def platform(gpu: str = "A100", **options: Any) -> Platform:
    return Platform(device=device_profile(gpu), **options)


@contextmanager
def corrected(gpu: str = "A100", **options: Any) -> Iterator[None]:
    chosen = platform(gpu, **options)
    with cuda_kernels(chosen):
        yield


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def saved(
    run: Callable[[], Any], gpu: str = "A100", backward: bool = True, **options: Any
) -> Saved:
    """What autograd saves while ``run`` runs, each as ``dtype[shape]``; the backward pass runs
    too."""
    found: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(named(tensor))
        return tensor

    with corrected(gpu, **options):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = run()
        if backward:
            output.sum().backward()
    return Counter(found)


def operators(run: Callable[[], Any], gpu: str = "A100", **options: Any) -> Counter[str]:
    """How often which operator runs, in forward and backward pass."""
    mode = Operators()
    with corrected(gpu, **options), mode:
        run().sum().backward()
    return mode.counts
