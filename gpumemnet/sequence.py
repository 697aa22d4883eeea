"""The layer sequence: what the transformer-based estimator reads of a job.

As in GPUMemNet (arXiv 2602.17817, section 4: one token per layer of type, activations and parameters), with the batch size
multiplied in, because memory follows their product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import InvalidJobError
from gpumemnet.job import TrainingJob
from gpumemnet.layer_table import layer_table
from gpumemnet.layers import GROUP_NAMES
from gpumemnet.physics import ELEMENT_BYTES

SEQUENCE_COLUMNS: Final[tuple[str, ...]] = (
    *(f"is_{group}" for group in GROUP_NAMES),
    "log_activation_bytes",
    "log_weight_bytes",
)
"""Columns of one layer: its group as one-hot; log(1 + output bytes of the whole batch); log(1 + weight bytes)."""


def layer_sequence(jobs: Sequence[TrainingJob]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Layer sequences of ``B`` jobs, padded with zeros to the longest, ``L`` layers.

    Returns:
        The sequences, shape ``[B, L, F]`` with the columns :data:`SEQUENCE_COLUMNS`, and the mask of real layers, ``[B, L]``.

    Raises:
        InvalidJobError: when a job has totals only.
    """
    for job in jobs:
        if not job.has_layers:
            raise InvalidJobError("is empty: the transformer-based estimator needs the layer list, not totals alone", "layers")
    table = layer_table(jobs)
    length = int(table.counts.max(initial=0))
    mask = np.arange(length) < table.counts[:, None]
    elements = [ELEMENT_BYTES[job.precision] for job in jobs]
    batch_activation_bytes = np.array(
        [job.batch_size * e.activation for job, e in zip(jobs, elements, strict=True)], dtype=np.float64
    )
    weight_bytes = np.array([e.weight for e in elements], dtype=np.float64)
    flat = np.zeros((len(table.owner), len(SEQUENCE_COLUMNS)), dtype=np.float32)
    flat[np.arange(len(flat)), table.group] = 1.0
    flat[:, -2] = np.log1p(table.activations * batch_activation_bytes[table.owner])
    flat[:, -1] = np.log1p(table.parameters * weight_bytes[table.owner])
    sequences = np.zeros((len(jobs), length, len(SEQUENCE_COLUMNS)), dtype=np.float32)
    sequences[mask] = flat
    return sequences, mask
