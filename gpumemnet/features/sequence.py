"""The layer sequence: what the transformer-based estimator reads of a job.

As in GPUMemNet (arXiv 2602.17817, section 4: one token per layer of type, activations and parameters), with the batch size
multiplied in, because memory follows their product.  Long networks are read at a lower resolution: attention costs the square of
the length, and what a network of a thousand layers repeats needs no thousand tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import InvalidJobError
from gpumemnet.features.layer_table import LayerTable, layer_table
from gpumemnet.features.option_columns import job_table
from gpumemnet.job.layers import GROUP_NAMES
from gpumemnet.job.training_job import TrainingJob

Array = NDArray[np.float64]

MAX_TOKENS: Final = 128
"""A longer list is cut into stretches of equally many layers, one token each."""

SEQUENCE_COLUMNS: Final[tuple[str, ...]] = (
    *(f"is_{group}" for group in GROUP_NAMES),
    "log_activation_bytes",
    "log_weight_bytes",
)
"""Columns of one token: the share of its layers in each group (a one-hot for a single layer); log(1 + output bytes of the whole
batch); log(1 + weight bytes), both summed over its layers."""


def layer_sequence(jobs: Sequence[TrainingJob]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Layer sequences of ``B`` jobs, padded with zeros to the longest, ``L`` tokens.

    Returns:
        The sequences, shape ``[B, L, F]`` with the columns :data:`SEQUENCE_COLUMNS`, and the mask of real tokens, ``[B, L]``.

    Raises:
        InvalidJobError: when a job has totals only.
    """
    table = layer_table(jobs)
    if not table.counts.all():
        raise InvalidJobError("is empty: the transformer-based estimator needs the layer list, not totals alone", "layers")
    known = job_table(jobs)
    output_bytes, weight_bytes = known.batch_size * known.activation_bytes, known.weight_bytes
    owner = table.owner
    layer_bytes = table.activations * output_bytes[owner], table.parameters * weight_bytes[owner]
    if table.counts.max(initial=0) <= MAX_TOKENS:
        tokens = table.counts
        flat = np.zeros((len(owner), len(SEQUENCE_COLUMNS)), dtype=np.float32)
        flat[np.arange(len(flat)), table.group] = 1.0
        flat[:, -2], flat[:, -1] = map(np.log1p, layer_bytes)
    else:
        tokens, flat = _stretches(table, owner, *layer_bytes)
    mask = np.arange(int(tokens.max(initial=0))) < tokens[:, None]
    sequences = np.zeros((*mask.shape, len(SEQUENCE_COLUMNS)), dtype=np.float32)
    sequences[mask] = flat
    return sequences, mask


def _stretches(
    table: LayerTable, owner: NDArray[np.int64], output_bytes: Array, weight_bytes: Array
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Tokens of each job, shape ``[B]``, and their rows, ``[T, F]``, where lists are cut into stretches."""
    stretch = -(-table.counts // MAX_TOKENS)
    tokens = -(-table.counts // np.maximum(stretch, 1))
    first_layer, first_token = table.counts.cumsum() - table.counts, tokens.cumsum() - tokens
    place = np.arange(len(owner)) - first_layer[owner]
    token = first_token[owner] + place // stretch[owner]
    count, groups = int(tokens.sum()), len(GROUP_NAMES)
    rows = np.empty((count, len(SEQUENCE_COLUMNS)), dtype=np.float32)
    per_group = np.bincount(token * groups + table.group, minlength=count * groups).reshape(count, groups)
    rows[:, :groups] = per_group / per_group.sum(axis=1, keepdims=True)
    rows[:, -2] = np.log1p(np.bincount(token, output_bytes, minlength=count))
    rows[:, -1] = np.log1p(np.bincount(token, weight_bytes, minlength=count))
    return tokens, rows
