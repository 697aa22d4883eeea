"""Checks the counts of many jobs at once and derives their totals from their layers.

:func:`gpumemnet.job.training_job.settle_numbers` applies the same rules to one job and writes the error messages; readers call
it for the rows found here.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.job.job_table import Array, Indices
from gpumemnet.job.layers import MAX_ELEMENTS
from gpumemnet.job.training_job import FIELD_RANGES, NULLABLE_FIELDS, NUMBER_FIELDS, UNSTATED_AS_ZERO

_SMALLEST, _LARGEST = (np.array([limits[place] for limits in FIELD_RANGES], dtype=np.float64)[:, None] for place in (1, 2))
_IS_REQUIRED: Final = np.array([name not in NULLABLE_FIELDS for name in NUMBER_FIELDS])[:, None]
_UNSTATED_AS_ZERO: Final = [NUMBER_FIELDS.index(name) for name in sorted(UNSTATED_AS_ZERO)]
_TOTALS: Final = [NUMBER_FIELDS.index(name) for name in ("total_activations", "total_parameters")]
_TRAINABLE: Final = NUMBER_FIELDS.index("trainable_parameters")


def settle_columns(numbers: Array, layer_counts: Indices, activations: Array, parameters: Array) -> NDArray[np.bool_]:
    """Derives the totals that are not stated; returns which jobs break a rule, shape ``[B]``.

    Args:
        numbers: the fields :data:`~gpumemnet.job.training_job.NUMBER_FIELDS`, NaN where a job does not state one, shape
            ``[9, B]``; changed in place.
        layer_counts: number of layers of each job, shape ``[B]``.
        activations, parameters: elements of all layers, shape ``[N]``.
    """
    is_wrong = (numbers < _SMALLEST) | (numbers > _LARGEST) | (np.isnan(numbers) & _IS_REQUIRED)
    breaks: NDArray[np.bool_] = is_wrong.any(axis=0)
    has_layers = layer_counts > 0
    owners = np.repeat(np.arange(len(layer_counts)), layer_counts)
    for place, amounts in zip(_TOTALS, (activations, parameters), strict=True):
        derived, stated = np.bincount(owners, amounts, minlength=len(layer_counts)), numbers[place]
        is_stated = ~np.isnan(stated)
        breaks |= np.where(has_layers, (is_stated & (stated != derived)) | (derived > MAX_ELEMENTS), ~is_stated)
        numbers[place] = np.where(is_stated, stated, derived)
    trainable, total = numbers[_TRAINABLE], numbers[_TOTALS[1]]
    breaks |= trainable > total
    numbers[_TRAINABLE] = np.where(np.isnan(trainable), total, trainable)
    for place in _UNSTATED_AS_ZERO:
        numbers[place][np.isnan(numbers[place])] = 0.0
    return breaks
