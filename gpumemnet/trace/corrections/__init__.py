"""What CUDA would do differently from meta tensors, corrected and listed.

:func:`cuda_overrides` gives the operators that change, for :func:`~gpumemnet.trace.corrections.overrides.overriding`;
:func:`~gpumemnet.trace.corrections.amp.cuda_autocast` is the context in which autocast and gradient scalers act;
:data:`~gpumemnet.trace.corrections.table.CORRECTIONS` is the list.
"""

from __future__ import annotations

from gpumemnet.trace.corrections.activations import ACTIVATIONS
from gpumemnet.trace.corrections.amp import cuda_autocast
from gpumemnet.trace.corrections.attention import attention_overrides
from gpumemnet.trace.corrections.autocast import autocast_overrides
from gpumemnet.trace.corrections.dropout import DROPOUT
from gpumemnet.trace.corrections.in_place import IN_PLACE
from gpumemnet.trace.corrections.normalization import NORMALIZATION
from gpumemnet.trace.corrections.overrides import Override, overriding
from gpumemnet.trace.corrections.recurrent import RECURRENT
from gpumemnet.trace.corrections.table import CORRECTIONS, Correction
from gpumemnet.trace.platform import Platform

__all__ = ["CORRECTIONS", "Correction", "Override", "cuda_autocast", "cuda_overrides", "overriding"]


def cuda_overrides(platform: Platform) -> list[Override]:
    """All overrides, outermost first: autocast casts before any other kernel looks at a tensor's type.

    Raises:
        InvalidRequestError: the platform asks for an attention kernel that does not exist.
    """
    own = (*DROPOUT, *ACTIVATIONS, *attention_overrides(platform), *NORMALIZATION, *RECURRENT, *IN_PLACE)
    return [*autocast_overrides(), *own]
