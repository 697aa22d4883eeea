"""Corrections of the differences between PyTorch on CUDA and on meta tensors, and the list of them.

:func:`cuda_overrides` returns the operators to replace, for
:func:`~gpumemnet.tracing.corrections.overrides.overriding`;
:func:`~gpumemnet.tracing.corrections.amp.cuda_autocast` is the context in which autocast and
gradient scalers act; :data:`~gpumemnet.tracing.corrections.table.CORRECTIONS` is the list.
"""

from __future__ import annotations

from gpumemnet.tracing.corrections.activations import ACTIVATIONS
from gpumemnet.tracing.corrections.amp import cuda_autocast
from gpumemnet.tracing.corrections.attention import attention_overrides
from gpumemnet.tracing.corrections.autocast import autocast_overrides
from gpumemnet.tracing.corrections.dropout import DROPOUT
from gpumemnet.tracing.corrections.in_place import IN_PLACE
from gpumemnet.tracing.corrections.normalization import NORMALIZATION
from gpumemnet.tracing.corrections.overrides import Override, overriding
from gpumemnet.tracing.corrections.recurrent import RECURRENT
from gpumemnet.tracing.corrections.table import CORRECTIONS, Correction
from gpumemnet.tracing.platform import Platform

__all__ = ["CORRECTIONS", "Correction", "Override", "cuda_autocast", "cuda_overrides", "overriding"]


def cuda_overrides(platform: Platform) -> list[Override]:
    """Return all overrides, outermost first: autocast casts before any other kernel sees a tensor's
    type.

    Raises:
        InvalidRequestError: there is no such attention kernel.
    """
    own = (
        *DROPOUT,
        *ACTIVATIONS,
        *attention_overrides(platform),
        *NORMALIZATION,
        *RECURRENT,
        *IN_PLACE,
    )
    return [*autocast_overrides(), *own]
