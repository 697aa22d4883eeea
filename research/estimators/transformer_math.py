"""Two formulas for transformers: EleutherAI's "Transformer Math 101", and the activations of
Korthikanti et al.

Both count bytes per token and block from width, heads and sequence length.  Left open there, and
assumed here: fp32 takes twice the bytes that they give for half precision, masks of dropout not;
    with one GPU there is no parallelism; logits are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from gpumemnet.physics.element_types import ELEMENT_BYTES, FULL_BYTES, HALF_BYTES
from gpumemnet.physics.optimizers import OPTIMIZER_RULES

from .estimator import PublishedEstimator, Subject
from .formulas import parameters
from .transformer_shape import TransformerShape, transformer_shape


def korthikanti_bytes(
    shape: TransformerShape, batch_size: int, element_bytes: int = HALF_BYTES
) -> int:
    """Activations that a transformer keeps: ``s b h (34 + 5 a s / h)`` per block in half precision.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
        MLSys 2023, equation 1.  Two of
    the 34 bytes per element are masks of dropout, and one of the 5.

    Args:
        shape: of the transformer.
        batch_size: sequences in a batch.
        element_bytes: of an activation.
    """
    scale = element_bytes // HALF_BYTES
    per_element = 32 * scale + 2
    per_score = 4 * scale + 1
    tokens = shape.sequence * batch_size
    return (
        shape.layers
        * tokens
        * (per_element * shape.hidden + per_score * shape.heads * shape.sequence)
    )


def eleuther_activation_bytes(
    shape: TransformerShape, batch_size: int, element_bytes: int = HALF_BYTES
) -> int:
    """Activations without recomputation by "Transformer Math 101": ``s b h L (10 + 24 / t + 5 a s /
    (h t))``, with ``t = 1``.

    The blog takes Korthikanti's formula for half precision and doubles all of it for fp32, masks
    included.

    Args:
        shape, batch_size, element_bytes: as for :func:`korthikanti_bytes`.
    """
    tokens = shape.sequence * batch_size
    half = shape.layers * tokens * (34 * shape.hidden + 5 * shape.heads * shape.sequence)
    return half * element_bytes // HALF_BYTES


def _model_states(subject: Subject) -> dict[str, int]:
    """Weights, gradients and optimizer state in the precision of the job."""
    weights = parameters(subject.job) * FULL_BYTES
    return {
        "weights": weights,
        "gradients": weights,
        "optimizer state": round(weights * OPTIMIZER_RULES[subject.job.optimizer].state_copies),
    }


def eleuther_parts(subject: Subject) -> Mapping[str, int]:
    """Model states and activations of "Transformer Math 101"."""
    element = ELEMENT_BYTES[subject.job.precision].activation
    activations = eleuther_activation_bytes(
        transformer_shape(subject), subject.job.batch_size, element
    )
    return _model_states(subject) | {"activations": activations}


def korthikanti_parts(subject: Subject) -> Mapping[str, int]:
    """Model states, and the activations of Korthikanti et al."""
    element = ELEMENT_BYTES[subject.job.precision].activation
    return _model_states(subject) | {
        "activations": korthikanti_bytes(
            transformer_shape(subject), subject.job.batch_size, element
        )
    }


_formula = partial(
    PublishedEstimator,
    needs="layers",
    leaves_out="logits and loss, optimizer's temporaries, allocator, context",
)
ELEUTHER: Final = _formula(
    name="Transformer Math 101",
    source="EleutherAI, blog 'Transformer Math 101', 2023",
    parts=eleuther_parts,
)
KORTHIKANTI: Final = _formula(
    name="Korthikanti activations",
    source="Korthikanti et al., MLSys 2023, equation 1",
    parts=korthikanti_parts,
)
