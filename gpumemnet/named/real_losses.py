"""The losses of trainers, around a real model: each returns what its trainer keeps until the step ends."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_CHUNK: Final = 128


class TrainedModel(nn.Module):
    """A model with its loss.

    Args:
        model: the model.
        constants: further arguments of the model.
    """

    def __init__(self, model: nn.Module, **constants: object) -> None:
        super().__init__()
        self.model: Any = model
        self._constants = constants


class OwnLoss(TrainedModel):
    """The loss that the model itself gives."""

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": self.model(**inputs, **self._constants).loss}


class ClassLoss(TrainedModel):
    """Cross entropy of logits in their own type."""

    def forward(self, labels: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        output = self.model(*inputs.values()) if "images" in inputs else self.model(**inputs)
        logits = output if isinstance(output, Tensor) else output.logits
        return {"loss": F.cross_entropy(logits.flatten(0, -2), labels.flatten())}


class DiffusionLoss(TrainedModel):
    """Mean squared error of the noise or velocity, in fp32, as the training scripts of ``diffusers`` take it."""

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        found = self.model(**inputs, **self._constants)[0]
        target = torch.zeros_like(found)  # with values, so that a step can be run, too
        return {"loss": ((found.float() - target.float()) ** 2).mean()}


class ChunkedLoss(TrainedModel):
    """The loss of ``litgpt`` (``litgpt/finetune/lora.py`` and ``full.py``, ``litgpt/utils.py``): in
    chunks, and with adapters the head too.  Fabric gives logits in fp32.  Their variable lives until
    the next forward pass has ended.
    """

    kept: tuple[Tensor, ...] = ()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        found = self.model(input_ids, **self._constants)
        parts = found if isinstance(found, list) else [found]
        self.kept = tuple(part.float() for part in parts)
        del found, parts
        logits = [*self.kept[:-1], self.kept[-1][..., :-1, :]]
        if len(logits) == 1:
            logits = list(torch.split(logits[0].flatten(0, 1), HEAD_CHUNK))
            targets = torch.split(labels[..., 1:].flatten(), HEAD_CHUNK)
        else:
            targets = torch.split(labels[..., 1:], HEAD_CHUNK, dim=1)
        losses = [
            F.cross_entropy(chunk.flatten(0, -2), target.flatten(), reduction="none")
            for chunk, target in zip(logits, targets, strict=True)
        ]
        return {"loss": torch.cat(losses).sum() / labels[..., 1:].numel()}


class FusedLoss(TrainedModel):
    """The loss of a language model without its logits."""

    def forward(self, labels: Tensor, **inputs: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        model = getattr(self.model, "get_base_model", lambda: self.model)()
        hidden = model.base_model(**inputs)[0]
        weight = model.get_output_embeddings().weight
        apply: Any = _LinearCrossEntropy.apply
        return {"loss": apply(hidden.flatten(0, 1), weight, labels.flatten())}


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
