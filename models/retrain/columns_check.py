"""Finds rows with batch size and input size swapped: the first layer's weights fit the batch size
instead of the input size.

The closed form gives nearly the same memory for such a row, so that no other check notices it.
"""

from __future__ import annotations

from typing import Final

from gpumemnet.job.training_job import TrainingJob

SWAPPED: Final = "batch-and-input-swapped"


def is_swapped(job: TrainingJob) -> bool:
    """Whether the weights of a first linear layer are those for an input of ``batch_size``
    elements, not ``input_elements``."""
    if not job.layers or job.layers[0].kind != "linear":
        return False
    outputs, weights = job.layers[0].activations, job.layers[0].parameters
    fits = [
        weights in (size * outputs, (size + 1) * outputs)
        for size in (job.input_elements, job.batch_size)
    ]
    return fits == [False, True]
