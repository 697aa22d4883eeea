"""Largest batches that ran on a card, and what a trace says of them.

timm publishes for each of its models the largest batch of a fixed ladder that its benchmark could
train on an RTX 3090: that batch ran, and the next one of the ladder did not.  No bytes were read,
so a trace is *exact* where it agrees on both, *too high* where it denies the batch that ran, and
*too low* where it allows the one that did not.

Source: huggingface/pytorch-image-models, ``results/benchmark-train-amp-*-pt112-cu113-rtx3090.csv``
and ``benchmark.py``: autocast, its optimizer ``sgd``, gradients set to zero and not freed (PyTorch
1.12), cuDNN's search, attention without a fused kernel.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

import gpumemnet
from gpumemnet.errors import GpumemnetError
from gpumemnet.gpu import available_mib, device_profile
from gpumemnet.torch_private.names import declare_torchvision_operators
from gpumemnet.units import MIB

GPU: Final = "RTX 3090"
EXACT, TOO_HIGH, TOO_LOW = "exact", "too high", "too low"


class Ladder(NamedTuple):
    """What a trace says of one model's ladder.

    Attributes:
        row: identifier of the row.
        family: the model's family.
        layout: ``nchw`` or ``nhwc``.
        fits_batch, fails_batch: the batch that ran, and the next, which did not.
        fits_expected_bytes, fits_safe_bytes: traced at the batch that ran, context included.
        fails_expected_bytes, fails_safe_bytes: traced at the batch that did not.
    """

    row: str
    family: str
    layout: str
    fits_batch: int
    fails_batch: int
    fits_expected_bytes: int
    fits_safe_bytes: int
    fails_expected_bytes: int
    fails_safe_bytes: int

    @property
    def expected(self) -> str:
        """Whether the expected bytes agree with the ladder."""
        return _agreement(self.fits_expected_bytes, self.fails_expected_bytes)

    @property
    def safe(self) -> str:
        """Whether the safe bytes agree with the ladder."""
        return _agreement(self.fits_safe_bytes, self.fails_safe_bytes)


def _agreement(fits_bytes: int, fails_bytes: int) -> str:
    usable = available_mib(device_profile(GPU)) * MIB
    return TOO_HIGH if fits_bytes > usable else EXACT if fails_bytes > usable else TOO_LOW


def ladder(row: Mapping[str, str]) -> Ladder | str:
    """What a trace says of the model of ``row``, or why it was not traced."""
    try:
        model = _model(row["model"])
        shape = tuple(map(int, row["input_shape"].split("x")))[1:]
        batches = [int(row[name]) for name in ("fits_batch", "fails_batch")]
        answers = [_traced(model, shape, batch, row["layout"]) for batch in batches]
    except (GpumemnetError, RuntimeError, ValueError) as error:
        return f"{row['row_id']}: {str(error).splitlines()[0]}"
    found = [each for answer in answers for each in (answer.expected_bytes, answer.safe_bytes)]
    return Ladder(row["row_id"], row["family"], row["layout"], *batches, *found)


def _model(name: str) -> nn.Module:
    declare_torchvision_operators()
    import timm

    timm.layers.set_fused_attn(False)
    with warnings.catch_warnings(), gpumemnet.large_tensors_on_meta():
        warnings.simplefilter("ignore")  # names that are deprecated since
        model: nn.Module = timm.create_model(name)
        return model


class _KeptGradients(torch.optim.SGD):
    """Sets gradients to zero, as PyTorch did by default before 2.0, and keeps their memory."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none=False)


def _traced(model: nn.Module, shape: tuple[int, ...], batch_size: int, layout: str) -> Any:
    def optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        return _KeptGradients(parameters, lr=1e-4, momentum=0.9, nesterov=True, foreach=False)

    return gpumemnet.trace(
        model,
        torch.empty(batch_size, *shape, device="meta"),
        loss="cross_entropy",
        optimizer=optimizer,
        precision="amp_fp16",
        gpu=GPU,
        context_mib=1973,  # PyTorch 1.12 loads all kernels: 1685 as read on this GPU, and cuDNN's 288
        channels_last=layout == "nhwc",
        cudnn_benchmark=True,
    )


def comparison(found: list[Ladder]) -> list[str]:
    """Lines of Markdown: how often expected and safe bytes agree, by layout."""
    lines = [
        "| layout | models | expected: exact | too high | too low | safe: too high | too low |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for layout in sorted({each.layout for each in found}):
        own = [each for each in found if each.layout == layout]
        cells = [_share(own, "expected", kind) for kind in (EXACT, TOO_HIGH, TOO_LOW)]
        cells += [_share(own, "safe", kind) for kind in (TOO_HIGH, TOO_LOW)]
        lines.append(f"| {layout} | {len(own)} | {' | '.join(cells)} |")
    return lines


def _share(found: list[Ladder], quantity: str, kind: str) -> str:
    return f"{sum(getattr(each, quantity) == kind for each in found) / len(found):.1%}"
