"""``DistributedDataParallel`` around a model that is traced: each rank holds all of it, and gradients are summed in buckets.

Its reducer is C++ (``torch/csrc/distributed/c10d/reducer.cpp``); it makes its buckets on the parameters' device, and so they are
meta tensors here (Li et al., arXiv 2006.15704).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpumemnet.tracing.recorder import Recorder


@contextmanager
def replicas_on_meta(recorder: Recorder) -> Iterator[None]:
    """Context in which ``DistributedDataParallel`` works on meta tensors.

    Args:
        recorder: told what is allocated in order to exchange: buckets, which are made anew before the second forward pass, and
            what sends parameters at first and buffers before each pass.
    """
    communicating = recorder.communicating()
    init: Callable[..., None] = DistributedDataParallel.__init__

    @communicating
    def made(
        self: object, module: object, device_ids: object = None, output_device: object = None, *args: Any, **kwargs: Any
    ) -> None:
        init(self, module, None, None, *args, **kwargs)  # there is one device, and its name is not the script's

    before_forward = communicating(DistributedDataParallel._pre_forward)
    with ExitStack() as stack:
        stack.enter_context(patch.object(DistributedDataParallel, "__init__", made))
        stack.enter_context(patch.object(DistributedDataParallel, "_pre_forward", before_forward))
        # Its kernels are CUDA's alone; what it keeps is what batch norm keeps, and statistics of a few numbers per channel.
        stack.enter_context(patch.object(nn.SyncBatchNorm, "forward", nn.BatchNorm2d.forward))
        # There is nobody to compare shapes with, and no values.
        stack.enter_context(patch("torch.nn.parallel.distributed._verify_param_shape_across_processes"))
        yield
