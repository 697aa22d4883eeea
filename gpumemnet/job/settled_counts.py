"""The rules for a job's counts: each within its range, totals that agree with the layers, no more
trainable than all parameters.

:mod:`gpumemnet.job.training_job` words the rule that a job breaks.  Cython compiles this module
with the types of ``settled_counts.pxd``.  Without a compiler it runs as it is.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Counts = MutableSequence[float] | NDArray[np.float64]
    Amounts = Sequence[float] | NDArray[np.float64]
    Codes = MutableSequence[int] | NDArray[Any]

IS_COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is compiled."""

MISSING_TOTAL: Final = 10
OTHER_TOTAL: Final = 11
LARGE_TOTAL: Final = 12
LARGE_TRAINABLE: Final = 13
"""Broken rules; a smaller number is the position, from 1, of a field that is missing or outside its
range."""
PER_FIELD: Final = 16
"""The number of a broken rule, plus this many times the position of the total that breaks it."""

# Positions of fields in gpumemnet.job.training_job.NUMBER_FIELDS, and their number.
_TOTAL_ACTIVATIONS: Final = 2
_TOTAL_PARAMETERS: Final = 3
_TRAINABLE_PARAMETERS: Final = 4
_FIELDS: Final = 9

_MISSING_TOTAL: Final = MISSING_TOTAL
_OTHER_TOTAL: Final = OTHER_TOTAL
_LARGE_TOTAL: Final = LARGE_TOTAL
_LARGE_TRAINABLE: Final = LARGE_TRAINABLE
_PER_FIELD: Final = PER_FIELD


def settle_counts(
    numbers: Counts,
    layer_counts: Sequence[int],
    activations: Amounts,
    parameters: Amounts,
    limits: Amounts,
    broken: Codes,
) -> None:
    """Checks the counts of ``B`` jobs, and fills in what they do not state: totals from the layers,
    and else 0.

    Args:
        numbers: one field after the other, each of all jobs, NaN where a job does not state one:
            ``9 * B`` numbers; changed.
        layer_counts: number of layers of each job.
        activations, parameters: elements of all layers, grouped by job.
        limits: the smallest value of each field, then the largest, then whether it may be missing:
            ``3 * 9`` numbers.
        broken: ``B`` numbers; each becomes the first rule that the job breaks, or 0.

    Raises:
        ValueError: when a buffer is too short.
    """
    jobs = len(broken)
    left = min(len(activations), len(parameters))
    if len(numbers) != _FIELDS * jobs or len(layer_counts) != jobs or len(limits) != 3 * _FIELDS:
        raise ValueError("too few numbers for the jobs")
    for row in range(jobs):
        if layer_counts[row] < 0 or layer_counts[row] > left:
            raise ValueError("too few layers for the jobs")
        left -= layer_counts[row]
    first = 0
    for row in range(jobs):
        broken[row] = _first_broken(numbers, jobs, row, limits)
        end = first + layer_counts[row]
        if broken[row] == 0:
            broken[row] = _settle_total(
                numbers, jobs, row, activations, first, end, _TOTAL_ACTIVATIONS, limits
            )
        if broken[row] == 0:
            broken[row] = _settle_total(
                numbers, jobs, row, parameters, first, end, _TOTAL_PARAMETERS, limits
            )
        if broken[row] == 0:
            total = numbers[_TOTAL_PARAMETERS * jobs + row]
            trainable = numbers[_TRAINABLE_PARAMETERS * jobs + row]
            if trainable != trainable:
                numbers[_TRAINABLE_PARAMETERS * jobs + row] = total
            elif trainable > total:
                broken[row] = _LARGE_TRAINABLE + _PER_FIELD * _TRAINABLE_PARAMETERS
        for field in range(_FIELDS):
            number = numbers[field * jobs + row]
            if number != number:
                numbers[field * jobs + row] = 0.0
        first = end


def _first_broken(numbers: Counts, jobs: int, row: int, limits: Amounts) -> int:
    """The position, from 1, of the first field of a job that is missing or outside its range; 0
    without one."""
    for field in range(_FIELDS):
        number = numbers[field * jobs + row]
        if number != number:
            if limits[2 * _FIELDS + field] == 0.0:
                return field + 1
        elif number < limits[field] or number > limits[_FIELDS + field]:
            return field + 1
    return 0


def _settle_total(
    numbers: Counts,
    jobs: int,
    row: int,
    amounts: Amounts,
    first: int,
    end: int,
    field: int,
    limits: Amounts,
) -> int:
    """Checks or fills in a job's total of ``amounts`` from ``first`` to ``end``; returns the broken
    rule, or 0."""
    derived = 0.0
    for layer in range(first, end):
        derived += amounts[layer]
    stated = numbers[field * jobs + row]
    if stated != stated:
        if first == end:
            return _MISSING_TOTAL + _PER_FIELD * field
        if derived > limits[_FIELDS + field]:
            return _LARGE_TOTAL + _PER_FIELD * field
        numbers[field * jobs + row] = derived
    elif first < end and stated != derived:
        return _OTHER_TOTAL + _PER_FIELD * field
    return 0
