"""The features that a job's totals and options give, and the numbers that the closed form needs of
it, in one pass over the rows.

Cython compiles this module with the types of ``totals.pxd``.  Without a compiler it runs as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpumemnet.job.training_job import FAMILIES, NUMBER_FIELDS
from gpumemnet.physics.step_memory import JobNumbers

if TYPE_CHECKING:
    from gpumemnet.physics.layer_records import Codes, MutableNumbers, Numbers

IS_COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is compiled."""
FLAGS: Final = 13 + len(FAMILIES)
"""Number of columns ``is_…``."""
TOTALS: Final = 7 + FLAGS + 7
"""How many columns :func:`fill_totals` writes: :data:`gpumemnet.predict.features.TOTAL_COLUMNS`."""

_FIELDS: Final = len(NUMBER_FIELDS)
_TOTALS: Final = TOTALS


class OptionNumbers:
    """The numbers that depend on a job's options alone.

    Attributes:
        flags: the columns ``is_…`` of :data:`gpumemnet.predict.features.TOTAL_COLUMNS`, in their
            order.
        input_bytes, weight_bytes, activation_bytes, copy_bytes, uncast_bytes: bytes per element,
        see
            :class:`gpumemnet.physics.element_types.ElementBytes`.
        state_copies, temporary_copies, loop_copies: see
        :class:`gpumemnet.physics.optimizers.OptimizerCopies`.
        filter_copies: optimizer state in copies of the convolutions' parameters, in addition to
            ``state_copies``.
        is_autocast, is_math_attention, is_checkpointed, is_channels_last, frees_outputs_first,
        keeps_outputs: options that the closed form reads, see
            :class:`gpumemnet.physics.step_memory.JobNumbers`.
    """

    __slots__ = (
        *("flags", "input_bytes", "weight_bytes", "activation_bytes", "copy_bytes", "uncast_bytes"),
        *("state_copies", "temporary_copies", "loop_copies", "filter_copies"),
        *("is_autocast", "is_math_attention", "is_checkpointed", "is_channels_last"),
        *("frees_outputs_first", "keeps_outputs"),
    )

    def __init__(self) -> None:
        self.flags = list((0.0,) * FLAGS)
        self.input_bytes = self.weight_bytes = self.activation_bytes = self.copy_bytes = (
            self.uncast_bytes
        ) = 0.0
        self.state_copies = self.temporary_copies = self.loop_copies = self.filter_copies = 0.0
        self.is_autocast = self.is_math_attention = self.is_checkpointed = self.is_channels_last = (
            False
        )
        self.frees_outputs_first = self.keeps_outputs = False


def fill_totals(
    features: MutableNumbers,
    width: int,
    numbers: Numbers,
    codes: Codes,
    options: list[OptionNumbers],
) -> list[JobNumbers]:
    """Writes the total columns of ``B`` jobs; returns what the closed form needs of each job beside
    its layers.

    Args:
        features: rows of ``width`` columns, one after the other; the first :data:`TOTALS` are
            written.
        width: columns of a row.
        numbers: the fields :data:`~gpumemnet.job.training_job.NUMBER_FIELDS`, each of all jobs:
            ``10 * B`` numbers.
        codes: position of each job's option set.
        options: the numbers of each option set.

    Raises:
        ValueError: if a buffer is too short, or a code is not that of an option set.
    """
    count = len(codes)
    if width < _TOTALS or len(features) // width < count or len(numbers) // _FIELDS < count:
        raise ValueError("too few numbers for the jobs")
    for row in range(count):
        if codes[row] < 0 or codes[row] >= len(options):
            raise ValueError("a code is not that of an option set")
    jobs = []
    for row in range(count):
        job = JobNumbers()
        _fill_row(features, row * width, numbers, count, row, options[codes[row]], job)
        jobs.append(job)
    return jobs


def _fill_row(
    features: MutableNumbers,
    begin: int,
    numbers: Numbers,
    count: int,
    row: int,
    option: OptionNumbers,
    job: JobNumbers,
) -> None:
    """Writes the columns of one job from ``begin`` on, and its ``job`` numbers."""
    # One field after the other, each with all jobs; the optional number of ranks (field 7) moves no
    # memory here.
    batch_size = numbers[row]
    input_elements = numbers[count + row]
    total_activations = numbers[2 * count + row]
    total_parameters = numbers[3 * count + row]
    trainable_parameters = numbers[4 * count + row]
    sequence_length = numbers[5 * count + row]
    gradient_accumulation = numbers[6 * count + row]
    traced_peak_bytes = numbers[8 * count + row]
    trainable_share = trainable_parameters / total_parameters if total_parameters > 0.0 else 1.0
    gradient_bytes = total_parameters * trainable_share * option.weight_bytes
    inputs = batch_size * input_elements

    before_flags = [
        batch_size,
        input_elements,
        total_parameters,
        trainable_share,
        total_activations,
        sequence_length,
        gradient_accumulation,
    ]
    after_flags = [
        traced_peak_bytes,
        total_parameters * (option.weight_bytes + option.copy_bytes),
        gradient_bytes,
        gradient_bytes * option.state_copies,
        gradient_bytes * option.temporary_copies,
        inputs * option.input_bytes,
        total_activations * batch_size * option.activation_bytes,
    ]
    for number in before_flags:
        features[begin] = number
        begin += 1
    for number in option.flags:
        features[begin] = number
        begin += 1
    for number in after_flags:
        features[begin] = number
        begin += 1

    job.batch_size = batch_size
    job.positions = max(sequence_length, 1.0)
    job.input_elements = inputs
    job.input_bytes = inputs * option.input_bytes
    job.frozen_parameters = total_parameters - trainable_parameters
    job.new_gradients = 1.0 if gradient_accumulation == 1.0 else 0.0
    job.weight_bytes = option.weight_bytes
    job.copy_bytes = option.copy_bytes
    job.uncast_bytes = option.uncast_bytes
    job.state_copies = option.state_copies
    job.temporary_copies = option.temporary_copies
    job.loop_copies = option.loop_copies
    job.filter_copies = option.filter_copies
    job.is_autocast = option.is_autocast
    job.is_math_attention = option.is_math_attention
    job.is_checkpointed = option.is_checkpointed
    job.is_channels_last = option.is_channels_last
    job.batches_on_gpu = max(numbers[9 * count + row], 1.0)
    job.frees_outputs_first = option.frees_outputs_first
    job.keeps_outputs = option.keeps_outputs
