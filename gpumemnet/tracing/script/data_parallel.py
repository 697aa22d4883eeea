"""``nn.DataParallel``: the first GPU holds the model, its share of the batch, and the gathered
output.

The other GPUs' replicas are not on it.  What is left out is the sum of their gradients, which
passes through it in buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpumemnet.extract.nested_tensors import map_tensors


def data_parallel_forward(note: Callable[[str], None]) -> Callable[..., Any]:
    """Return what replaces ``DataParallel.forward``: it runs the first GPU's share, and gathers an
    output of the whole batch.

    Args:
        note: called with a note, if there are several GPUs.
    """

    def forward(parallel: nn.DataParallel[Any], *inputs: Any, **kwargs: Any) -> Any:
        ranks, dimension = len(parallel.device_ids) or 1, parallel.dim
        if ranks == 1:
            return parallel.module(*inputs, **kwargs)
        note(
            f"DataParallel: the first of {ranks} GPUs; the sum of the gradients may take as much as they do for a moment"
        )

        def first_share(tensor: Tensor) -> Tensor:
            return tensor.chunk(ranks, dimension)[0] if tensor.ndim > dimension else tensor

        def gathered(tensor: Tensor) -> Tensor:
            gather: Any = Gathered.apply
            whole: Tensor = gather(
                tensor if tensor.ndim else tensor[None], ranks, dimension if tensor.ndim else 0
            )
            return whole

        return map_tensors(
            parallel.module(*map_tensors(inputs, first_share), **map_tensors(kwargs, first_share)),
            gathered,
        )

    return forward


class Gathered(torch.autograd.Function):
    """The outputs of all GPUs in one tensor; its gradient is the first GPU's share."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, ranks: int, dimension: int) -> Tensor:
        """Allocate the gathered tensor beside the share."""
        ctx.dimension, ctx.length = dimension, share.shape[dimension]
        shape = list(share.shape)
        shape[dimension] *= ranks
        return share.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the share's gradient."""
        return gradients[0].narrow(ctx.dimension, 0, ctx.length), None, None
