"""``DistributedDataParallel`` around a model that is traced: each rank holds all of it, and gradients are summed in buckets.

Its reducer is C++ (``torch/csrc/distributed/c10d/reducer.cpp``); it makes its buckets on the parameters' device, and so they are
meta tensors here (Li et al., arXiv 2006.15704).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def replicas_on_meta(communicating: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Context in which ``DistributedDataParallel`` works on meta tensors.

    Args:
        communicating: a context for what is allocated in order to exchange: buckets, which are made anew before the second
            forward pass, and what sends parameters at first and buffers before each pass.
    """

    init: Callable[..., None] = DistributedDataParallel.__init__
    before_forward: Callable[..., object] = DistributedDataParallel._pre_forward

    def made(
        self: object, module: object, device_ids: object = None, output_device: object = None, *args: Any, **kwargs: Any
    ) -> None:
        with communicating():
            init(self, module, None, None, *args, **kwargs)  # there is one device, and its name is not the script's

    def prepared(*args: Any, **kwargs: Any) -> object:
        with communicating():
            return before_forward(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(patch.object(DistributedDataParallel, "__init__", made))
        stack.enter_context(patch.object(DistributedDataParallel, "_pre_forward", prepared))
        # Its kernels are CUDA's alone; what it keeps is what batch norm keeps, and statistics of a few numbers per channel.
        stack.enter_context(patch.object(nn.SyncBatchNorm, "forward", nn.BatchNorm2d.forward))
        # There is nobody to compare shapes with, and no values.
        stack.enter_context(patch("torch.nn.parallel.distributed._verify_param_shape_across_processes"))
        yield
