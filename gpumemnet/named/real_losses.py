"""The losses of trainers, around a real model: each returns what its trainer keeps until the step ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_CHUNK: Final = 128


class TrainedModel(nn.Module):
    """A model with its loss.

    Args:
        model: the model.
        loss: gives the loss for the model and its arguments.
        constants: further arguments of the model.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], **constants: object) -> None:
        super().__init__()
        self.model, self._loss, self._constants = model, loss, constants

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": self._loss(self.model, **inputs, **self._constants)}


def own_loss(model: Any, **inputs: Any) -> Tensor:
    """The loss that the model itself gives."""
    loss: Tensor = model(**inputs).loss
    return loss


def class_loss(model: Any, labels: Tensor, **inputs: Any) -> Tensor:
    """Cross entropy of logits in their own type."""
    output = model(**inputs)
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def diffusion_loss(model: Any, **inputs: Any) -> Tensor:
    """Mean squared error of the noise or velocity, in fp32, as the training scripts of ``diffusers`` take it."""
    found: Tensor = model(**inputs)[0]
    target = torch.zeros_like(found)  # with values, so that a step can be run, too
    return ((found.float() - target.float()) ** 2).mean()


def chunked_loss(model: Any, input_ids: Tensor, labels: Tensor, **constants: Any) -> Tensor:
    """The loss of ``litgpt`` (``litgpt/finetune/lora.py`` and ``full.py``, ``litgpt/utils.py``): in
    chunks, and with adapters the head too.  Fabric gives logits in fp32.  Their variable lives until
    the next forward pass has ended.
    """
    found = model(input_ids, **constants)
    parts = found if isinstance(found, list) else [found]
    model.kept = kept = tuple(part.float() for part in parts)
    del found, parts
    logits = [*kept[:-1], kept[-1][..., :-1, :]]
    if len(logits) == 1:
        logits = list(torch.split(logits[0].flatten(0, 1), HEAD_CHUNK))
        targets = torch.split(labels[..., 1:].flatten(), HEAD_CHUNK)
    else:
        targets = torch.split(labels[..., 1:], HEAD_CHUNK, dim=1)
    losses = [
        F.cross_entropy(chunk.flatten(0, -2), target.flatten(), reduction="none")
        for chunk, target in zip(logits, targets, strict=True)
    ]
    return torch.cat(losses).sum() / labels[..., 1:].numel()


def fused_loss(model: Any, labels: Tensor, **inputs: Any) -> Tensor:
    """The loss of a language model without its logits."""
    base = getattr(model, "get_base_model", lambda: model)()
    hidden = base.base_model(**inputs)[0]
    weight, apply = base.get_output_embeddings().weight, cast(Any, _LinearCrossEntropy.apply)
    loss: Tensor = apply(hidden.flatten(0, 1), weight, labels.flatten())
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Allocates as Liger's ``LigerFusedLinearCrossEntropyFunction`` does: in chunks of rows, with
    the gradients in the forward pass
    (``liger_kernel/ops/fused_linear_cross_entropy.py``, version 0.7)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        if torch.is_autocast_enabled("cuda"):
            rows = rows.to(torch.get_autocast_dtype("cuda"))
            weight_used = weight.to(rows.dtype)
        else:
            weight_used = weight
        count, width = rows.shape
        share = -(-count // -(-weight.shape[0] // width))
        size = 1 << (share - 1).bit_length()
        of_rows = torch.zeros_like(rows)
        of_weight = torch.zeros_like(weight_used) if weight.requires_grad else None
        loss = torch.zeros(count, dtype=torch.float32, device=rows.device)
        for start in range(0, count, size):
            chunk = rows[start : start + size]
            logits = chunk @ weight_used.t()
            of_rows[start : start + size] = logits @ weight_used
            if of_weight is not None:
                of_weight += torch.mm(logits.t(), chunk).float()
        ctx.save_for_backward(of_rows, of_weight)
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, which are there."""
        of_rows, of_weight = ctx.saved_tensors
        return of_rows, of_weight, None
