"""Derives fields of a job from the layers of its model: family, attention kernel, main activation
function, sequence length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from gpumemnet.job.layers import GROUP_OF_KIND, LAYER_GROUPS
from gpumemnet.job.training_job import ACTIVATION_FUNCTIONS
from gpumemnet.physics.attention_kernels import MATH

if TYPE_CHECKING:
    from torch import Tensor

    from gpumemnet.extract.walk import Call, Walk

_NON_LINEARITIES: Final = frozenset(LAYER_GROUPS["activation"]) - {
    "softmax",
    "log_softmax",
    "identity",
    "activation",
}
_GATED: Final = {"silu": "swiglu", "gelu": "geglu"}
_LOOK_AHEAD: Final = 3
"""Number of layers to look ahead for the values of a softmax, or the other half of a gate."""


def family_of(calls: Sequence[Call]) -> str:
    """Return ``transformer`` for a model with attention, else ``cnn`` for one with convolutions,
    else ``mlp``."""
    if attention_length(calls) is not None:
        return "transformer"
    return "cnn" if any(GROUP_OF_KIND.get(call.kind) == "conv" for call in calls) else "mlp"


def attention_length(calls: Sequence[Call]) -> int | None:
    """Return the longest query sequence of attention: a fused kernel, or a softmax whose output
    multiplies values."""
    lengths = []
    for index, call in enumerate(calls):
        following = calls[index + 1 : index + 1 + _LOOK_AHEAD]
        if GROUP_OF_KIND.get(call.kind) == "attention" and call.sequence_length:
            lengths.append(call.sequence_length)
        elif (
            call.kind == "softmax"
            and len(call.shape) >= 3
            and any(later.kind == "matmul" for later in following)
        ):
            lengths.append(call.shape[-2])
    return max(lengths, default=None)


def attention_kernel_of(seen: Walk) -> str | None:
    """Return the kernel of most attention; ``math`` where the model computes its scores itself,
    ``None`` without attention."""
    if seen.attention_kernel is not None:
        return seen.attention_kernel
    return None if attention_length(seen.calls) is None else MATH


def sequence_length_of(calls: Sequence[Call], inputs: Sequence[Tensor]) -> int | None:
    """Return tokens per sample: of a token input ``[batch, tokens]``, else of the longest attention
    or recurrent layer."""
    for tensor in inputs:
        if tensor.ndim == 2 and not tensor.is_floating_point() and tensor.shape[1] > 1:
            return tensor.shape[1]
    return attention_length(calls) or max(
        (c.sequence_length for c in calls if c.sequence_length), default=None
    )


def activation_function_of(calls: Sequence[Call]) -> str | None:
    """Return the most frequent non-linearity; ``other`` for one that a job cannot name."""
    counts: Counter[str] = Counter()
    for index, call in enumerate(calls):
        if call.kind not in _NON_LINEARITIES:
            continue
        if call.part_of is not None:
            counts[call.part_of] += 1
            continue
        following = calls[index + 1 : index + 1 + _LOOK_AHEAD]
        gates = any(
            c.kind == "multiply" and c.joins_activations and c.shape == call.shape
            for c in following
        )
        counts[_GATED[call.kind] if gates and call.kind in _GATED else call.kind] += 1
    if not counts:
        return None
    name = counts.most_common(1)[0][0]
    return name if name in ACTIVATION_FUNCTIONS else "other"
