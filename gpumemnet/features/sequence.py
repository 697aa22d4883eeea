"""Computes the layer sequence, the input of the transformer-based estimator.

As in GPUMemNet (arXiv 2602.17817, section 4), each token holds the type, activations and parameters
of a layer.  Here activations are multiplied by the batch size, because memory depends on the
product.  In long networks one token covers several layers: the cost of attention grows with the
square of the length, and long networks mostly repeat the same layers.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import InvalidJobError
from gpumemnet.features.option_numbers import option_numbers
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import GROUP_NAMES
from gpumemnet.physics.layer_records import LAYER_KINDS

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

MAX_TOKENS: Final = 128
"""Most tokens of a job; a longer layer list is divided into runs of equal length, one token per
run."""

SEQUENCE_COLUMNS: Final[tuple[str, ...]] = (
    *(f"is_{group}" for group in GROUP_NAMES),
    "log_activation_bytes",
    "log_weight_bytes",
)
"""Columns of one token: the share of its layers in each group (one-hot for a single layer), log(1 +
output bytes of the whole batch) and log(1 + weight bytes).  Bytes are summed over the token's
layers."""


_GROUP_OF_CODE: Final = np.array([kind.group for kind in LAYER_KINDS], dtype=np.int64)


def layer_sequence(table: JobTable) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Computes layer sequences of ``B`` jobs, padded with zeros to the longest, ``L`` tokens.

    Returns:
        The sequences, shape ``[B, L, F]`` with the columns :data:`SEQUENCE_COLUMNS`, and the mask
        of real tokens, ``[B, L]``.

    Raises:
        InvalidJobError: when a job has no layer list.
    """
    counts = table.layer_counts
    if not counts.all():
        raise InvalidJobError(
            "is empty: the transformer-based estimator needs the layer list, not totals alone",
            "layers",
        )
    owners = table.layer_owners
    options = [option_numbers(options) for options in table.option_sets]
    activation_bytes = np.array([each.activation_bytes for each in options])[table.option_codes]
    parameter_bytes = np.array([each.weight_bytes for each in options])[table.option_codes]
    output_bytes = table.layer_activations * (table.column("batch_size") * activation_bytes)[owners]
    weight_bytes = table.layer_parameters * parameter_bytes[owners]
    groups = _GROUP_OF_CODE[table.known_kinds]
    if counts.max(initial=0) <= MAX_TOKENS:
        tokens = counts
        flat = np.zeros((len(owners), len(SEQUENCE_COLUMNS)), dtype=np.float32)
        flat[np.arange(len(flat)), groups] = 1.0
        flat[:, -2], flat[:, -1] = np.log1p(output_bytes), np.log1p(weight_bytes)
    else:
        tokens, flat = _stretches(counts, owners, groups, output_bytes, weight_bytes)
    mask = np.arange(int(tokens.max(initial=0))) < tokens[:, None]
    sequences = np.zeros((*mask.shape, len(SEQUENCE_COLUMNS)), dtype=np.float32)
    sequences[mask] = flat
    return sequences, mask


def _stretches(
    counts: Indices,
    owners: Indices,
    layer_groups: Indices,
    output_bytes: Array,
    weight_bytes: Array,
) -> tuple[Indices, NDArray[np.float32]]:
    """Divides layer lists into runs; returns the number of tokens of each job, shape ``[B]``, and
    all tokens, ``[T, F]``."""
    stretch = -(-counts // MAX_TOKENS)
    tokens = -(-counts // np.maximum(stretch, 1))
    first_layer, first_token = counts.cumsum() - counts, tokens.cumsum() - tokens
    position = np.arange(len(owners)) - first_layer[owners]
    token = first_token[owners] + position // stretch[owners]
    count, groups = int(tokens.sum()), len(GROUP_NAMES)
    rows = np.empty((count, len(SEQUENCE_COLUMNS)), dtype=np.float32)
    per_group = np.bincount(token * groups + layer_groups, minlength=count * groups).reshape(
        count, groups
    )
    rows[:, :groups] = per_group / per_group.sum(axis=1, keepdims=True)
    rows[:, -2] = np.log1p(np.bincount(token, output_bytes, minlength=count))
    rows[:, -1] = np.log1p(np.bincount(token, weight_bytes, minlength=count))
    return tokens, rows
