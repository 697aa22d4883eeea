"""Inputs of GPUMemNet's networks: the feature vector of each family, and the layer sequence (arXiv
2602.17817, section 4).

Amounts are given as log(1 + amount), and the networks standardise every column on their training
rows.  The paper uses raw amounts, which span nine decades.  This is a known defect, and correcting
it favours the paper's networks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.errors import InvalidJobError
from gpumemnet.job.job_table import JobTable
from gpumemnet.job.layers import LAYER_GROUPS
from gpumemnet.job.training_job import ACTIVATION_FUNCTIONS, TrainingJob
from gpumemnet.physics.layer_records import LAYER_KINDS

COUNTED_KINDS: Final[dict[str, tuple[str, ...]]] = {
    "linear": LAYER_GROUPS["linear"],
    "batch_norm": tuple(kind for kind in LAYER_GROUPS["norm"] if kind.startswith("batch_norm")),
    "dropout": LAYER_GROUPS["dropout"],
    "conv": LAYER_GROUPS["conv"],
    "layer_norm": ("layer_norm",),
}
"""Counted type of layer → the layer kinds that it includes."""
FAMILY_COUNTS: Final[dict[str, tuple[str, ...]]] = {
    "mlp": ("linear", "batch_norm", "dropout"),
    "cnn": ("linear", "batch_norm", "dropout", "conv"),
    "transformer": ("linear", "batch_norm", "dropout", "layer_norm"),
}
"""Family → the types of layers that are counted."""
FAMILIES_WITH_BATCH_ACTIVATIONS: Final = ("cnn", "transformer")
ACTIVATION_ORDER: Final = tuple(sorted(ACTIVATION_FUNCTIONS))
"""Activation functions in the order of their encoding: position ``i`` of ``n`` becomes ``(sin,
cos)(i·π/n)``.

The paper's list is also alphabetical, but has 10 or 11 functions.  This one has every function that
a job can name.
"""
SEQUENCE_WIDTH: Final = 3
"""Columns of one layer: position of its group in :data:`gpumemnet.job.layers.GROUP_NAMES`, log
activations, log parameters."""


def paper_features(jobs: Sequence[TrainingJob]) -> NDArray[np.float64]:
    """Return the feature vectors of ``B`` jobs of one family, shape ``[B, F]``.

    Columns: log(1 + …) of the layer counts of :data:`FAMILY_COUNTS`, batch size, parameters,
        activations per sample and, for CNNs
    and transformers, activations of the batch; then sine and cosine of the activation function.
    ``F`` is 8, 10 and 10.

    Raises:
        InvalidJobError: when a job has totals only.
        ValueError: when the jobs are of several families.
    """
    _require_layers(jobs)
    families = {job.family for job in jobs}
    if len(families) > 1:
        raise ValueError(
            f"jobs of {', '.join(sorted(families))} have different features: give one family at a time"
        )
    amounts = np.log1p(np.array([_amounts(job) for job in jobs], dtype=np.float64))
    places = np.array(
        [ACTIVATION_ORDER.index(job.activation_function or "identity") for job in jobs]
    )
    angles = places * (np.pi / len(ACTIVATION_ORDER))
    return np.column_stack((amounts, np.sin(angles), np.cos(angles)))


def paper_sequences(jobs: Sequence[TrainingJob]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the layer sequences of ``B`` jobs, padded with zeros to the longest, ``L`` layers.

    The paper's codes of layer types differ between families and combine most types.  Here the code
    is the layer's group.

    Returns:
        The sequences, shape ``[B, L, 3]`` (:data:`SEQUENCE_WIDTH`), and the mask of real layers,
        shape ``[B, L]``.

    Raises:
        InvalidJobError: when a job has totals only.
    """
    _require_layers(jobs)
    table = JobTable.from_jobs(jobs)
    counts, groups = (
        table.layer_counts,
        np.array([kind.group for kind in LAYER_KINDS])[table.known_kinds],
    )
    mask = np.arange(counts.max(initial=0)) < counts[:, None]
    sequences = np.zeros((*mask.shape, SEQUENCE_WIDTH))
    sequences[mask] = np.column_stack(
        (groups, np.log1p(table.layer_activations), np.log1p(table.layer_parameters))
    )
    return sequences, mask


def _require_layers(jobs: Sequence[TrainingJob]) -> None:
    if not all(job.has_layers for job in jobs):
        raise InvalidJobError(
            "is empty: the paper's estimators need the layer list, not totals alone", "layers"
        )


def _amounts(job: TrainingJob) -> list[int]:
    kinds = Counter(layer.kind for layer in job.layers)
    counts = [
        sum(kinds[kind] for kind in COUNTED_KINDS[sort]) for sort in FAMILY_COUNTS[job.family]
    ]
    assert job.total_parameters is not None
    assert job.total_activations is not None
    amounts = [*counts, job.batch_size, job.total_parameters, job.total_activations]
    if job.family in FAMILIES_WITH_BATCH_ACTIVATIONS:
        amounts.append(job.total_activations * job.batch_size)
    return amounts
