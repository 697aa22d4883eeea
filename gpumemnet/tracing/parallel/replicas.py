"""``DistributedDataParallel`` around a traced model: each rank holds all of it, and gradients are
summed in buckets.

Its reducer is C++ (``torch/csrc/distributed/c10d/reducer.cpp``).  It allocates buckets on the
parameters' device, so they are meta tensors here (Li et al., arXiv 2006.15704).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from gpumemnet.torch_private import distributed as names
from gpumemnet.torch_private.names import replaced
from gpumemnet.tracing.recorder import Recorder


@contextmanager
def replicas_on_meta(recorder: Recorder) -> Iterator[None]:
    """Context in which ``DistributedDataParallel`` works on meta tensors.

    Args:
        recorder: records what is allocated to communicate: buckets, which are rebuilt before the
            second forward pass, and buffers for sending parameters at first and module buffers
            before each pass.
    """
    communicating = recorder.communicating()
    init: Callable[..., None] = names.DDP_INIT.value()

    @communicating
    def made(
        self: object,
        module: object,
        device_ids: object = None,
        output_device: object = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        init(self, module, None, None, *args, **kwargs)  # there is only the meta device here

    replacements = (
        (names.DDP_INIT, made),
        (names.DDP_PRE_FORWARD, communicating(names.DDP_PRE_FORWARD.value())),
        # A synchronized batch norm keeps what a batch norm keeps, and statistics of a few numbers
        # per channel.
        (names.SYNC_BATCH_NORM, nn.BatchNorm2d.forward),
        (names.VERIFY_SHAPES, lambda *args, **kwargs: None),
    )
    with replaced(replacements):
        yield
