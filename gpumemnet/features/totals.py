"""The features that a job's totals and options give, and the numbers that the closed form needs of it: one pass over the rows.

As the closed form (:mod:`gpumemnet.physics.closed_form`) this module runs as it stands, and is compiled with the types of
``totals.pxd`` where that can be.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Final

from gpumemnet.features.option_numbers import FLAGS, OPTION_NUMBERS
from gpumemnet.job.training_job import NUMBER_FIELDS
from gpumemnet.physics.closed_form import JOB_COLUMNS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Amounts = MutableSequence[float] | NDArray[np.float64]
    Numbers = Sequence[float] | NDArray[np.float64]
    Codes = Sequence[int] | NDArray[np.int64]

IS_COMPILED: Final = not __file__.endswith(".py")
"""Whether this is the compiled form."""
TOTALS: Final = 7 + FLAGS + 7
"""How many columns :func:`fill_totals` writes: :data:`gpumemnet.features.vector.TOTAL_COLUMNS`."""

_FLAGS: Final = FLAGS
_FIELDS: Final = len(NUMBER_FIELDS)
_OPTION_WIDTH: Final = len(OPTION_NUMBERS)
_JOB_WIDTH: Final = len(JOB_COLUMNS)
_TOTALS: Final = TOTALS


def fill_totals(features: Amounts, width: int, job_columns: Amounts, numbers: Numbers, codes: Codes, options: Numbers) -> None:
    """Write the total columns of ``B`` jobs, and the closed form's :data:`~gpumemnet.physics.closed_form.JOB_COLUMNS`.

    Args:
        features: rows of ``width`` columns, one after the other; the first :data:`TOTALS` are written.
        width: columns of a row.
        job_columns: ``B`` rows of the closed form's columns, written.
        numbers: the fields :data:`~gpumemnet.job.training_job.NUMBER_FIELDS`, each of all jobs: ``9 * B`` numbers.
        codes: position of each job's option set.
        options: the numbers :data:`~gpumemnet.features.option_numbers.OPTION_NUMBERS` of each option set.

    Raises:
        ValueError: when a buffer is too short, or a code is none of an option set.
    """
    count = len(codes)
    sets = len(options) // _OPTION_WIDTH
    is_short = width < _TOTALS or len(features) // width < count or len(job_columns) // _JOB_WIDTH < count
    if is_short or len(numbers) // _FIELDS < count:
        raise ValueError("too few numbers for the jobs")
    for job in range(count):
        if codes[job] < 0 or codes[job] >= sets:
            raise ValueError("a code is none of an option set")
    for job in range(count):
        batch_size = numbers[job]
        input_elements = numbers[count + job]
        total_activations = numbers[2 * count + job]
        total_parameters = numbers[3 * count + job]
        trainable_parameters = numbers[4 * count + job]
        sequence_length = numbers[5 * count + job]
        gradient_accumulation = numbers[6 * count + job]
        traced_peak_bytes = numbers[8 * count + job]
        flags = codes[job] * _OPTION_WIDTH
        option = flags + _FLAGS
        input_bytes, weight_bytes, activation_bytes = options[option], options[option + 1], options[option + 2]
        copy_bytes, base_bytes, state_copies = options[option + 3], options[option + 4], options[option + 5]
        temporary_copies, loop_copies, filter_copies = options[option + 6], options[option + 7], options[option + 8]
        share = trainable_parameters / total_parameters if total_parameters > 0.0 else 1.0
        trained_bytes = total_parameters * share * weight_bytes
        inputs = batch_size * input_elements

        place = job * width
        features[place] = batch_size
        features[place + 1] = input_elements
        features[place + 2] = total_parameters
        features[place + 3] = share
        features[place + 4] = total_activations
        features[place + 5] = sequence_length
        features[place + 6] = gradient_accumulation
        place += 7
        for flag in range(_FLAGS):
            features[place + flag] = options[flags + flag]
        place += _FLAGS
        features[place] = traced_peak_bytes
        features[place + 1] = total_parameters * (weight_bytes + copy_bytes)
        features[place + 2] = trained_bytes
        features[place + 3] = trained_bytes * state_copies
        features[place + 4] = trained_bytes * temporary_copies
        features[place + 5] = inputs * input_bytes
        features[place + 6] = total_activations * batch_size * activation_bytes

        place = job * _JOB_WIDTH
        job_columns[place] = batch_size
        job_columns[place + 1] = max(sequence_length, 1.0)
        job_columns[place + 2] = weight_bytes
        job_columns[place + 3] = base_bytes
        job_columns[place + 4] = copy_bytes
        job_columns[place + 5] = state_copies
        job_columns[place + 6] = temporary_copies
        job_columns[place + 7] = total_parameters - trainable_parameters
        job_columns[place + 8] = 1.0 if gradient_accumulation == 1.0 else 0.0
        job_columns[place + 9] = inputs * input_bytes
        job_columns[place + 10] = options[option + 9]  # autocast
        job_columns[place + 11] = options[option + 10]  # attention step by step
        job_columns[place + 12] = options[option + 11]  # checkpointing
        job_columns[place + 13] = loop_copies
        job_columns[place + 14] = inputs
        job_columns[place + 15] = options[option + 12]  # channels last
        job_columns[place + 16] = filter_copies
