"""Jobs as columns: their numbers, and what their options alone make of the features.

A thousand jobs share a handful of option sets, so flags, bytes per element and optimizer copies are worked out once for each set
and then looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np

from gpumemnet.job.job_batch import NUMBER_FIELDS, OPTIONS_OF, Array, JobBatch, number_columns
from gpumemnet.job.training_job import FAMILIES, TrainingJob
from gpumemnet.physics.element_types import ELEMENT_BYTES, MODEL_TYPES, SCALED_PRECISIONS
from gpumemnet.physics.optimizers import OPTIMIZER_RULES, filter_copies, optimizer_copies

FLAGS: Final = 16
"""How many columns ``is_…`` there are."""
_KNOWN_OPTION_SETS: Final = 4096


class OptionNumbers(NamedTuple):
    """What a set of options is in numbers.

    Attributes:
        flags: the columns ``is_…`` of :data:`gpumemnet.features.vector.TOTAL_COLUMNS`, in their order.
        input_bytes, weight_bytes, activation_bytes, copy_bytes: per element, see
            :class:`gpumemnet.physics.element_types.ElementBytes`.
        base_bytes: per output element of a layer whose kind says nothing else.
        state_copies, temporary_copies, loop_copies: see :class:`gpumemnet.physics.optimizers.OptimizerCopies`.
        filter_copies: optimizer state in copies of the parameters of convolutions, beside ``state_copies``.
        is_autocast, is_math, is_checkpointed, is_channels_last: 1 where it is so.
    """

    flags: tuple[float, ...]
    input_bytes: float
    weight_bytes: float
    activation_bytes: float
    copy_bytes: float
    base_bytes: float
    state_copies: float
    temporary_copies: float
    loop_copies: float
    filter_copies: float
    is_autocast: float
    is_math: float
    is_checkpointed: float
    is_channels_last: float


def option_numbers(job: TrainingJob) -> OptionNumbers:
    """The numbers of the job's options."""
    return _option_numbers(OPTIONS_OF(job))


@lru_cache(maxsize=_KNOWN_OPTION_SETS)
def _option_numbers(options: tuple[Any, ...]) -> OptionNumbers:
    family, optimizer, precision, _, kernel, implementation, checkpointing, channels_last, cudnn_benchmark = options
    element = ELEMENT_BYTES[precision]
    copies = optimizer_copies(optimizer, implementation)
    flags = (
        *(checkpointing != "none", channels_last, cudnn_benchmark),
        *(family == each for each in FAMILIES),
        *(element.is_autocast, precision in SCALED_PRECISIONS, precision in MODEL_TYPES, precision == "tf32"),
        *(copies.is_foreach, implementation == "fused", OPTIMIZER_RULES[optimizer].is_factored),
        *(kernel == "flash", kernel == "memory_efficient", kernel == "math"),
    )
    return OptionNumbers(
        flags=tuple(map(float, flags)),
        input_bytes=element.inputs,
        weight_bytes=element.weight,
        activation_bytes=element.activation,
        copy_bytes=element.weight_copy,
        base_bytes=element.uncast,
        state_copies=copies.state,
        temporary_copies=copies.temporary,
        loop_copies=copies.loop,
        filter_copies=filter_copies(optimizer),
        is_autocast=float(element.is_autocast),
        is_math=float(kernel == "math"),
        is_checkpointed=float(checkpointing != "none"),
        is_channels_last=float(channels_last),
    )


@dataclass(frozen=True, slots=True, eq=False)
class JobTable:
    """``B`` jobs in columns of shape ``[B]``, named as in :class:`~gpumemnet.job.training_job.TrainingJob` and
    :class:`OptionNumbers`.

    What a job does not state is 0; ``flags`` has shape ``[FLAGS, B]``.
    """

    batch_size: Array
    input_elements: Array
    total_parameters: Array
    trainable_parameters: Array
    total_activations: Array
    sequence_length: Array
    gradient_accumulation: Array
    ranks: Array
    traced_peak_bytes: Array
    flags: Array
    input_bytes: Array
    weight_bytes: Array
    activation_bytes: Array
    copy_bytes: Array
    base_bytes: Array
    state_copies: Array
    temporary_copies: Array
    loop_copies: Array
    filter_copies: Array
    is_autocast: Array
    is_math: Array
    is_checkpointed: Array
    is_channels_last: Array


def job_table(jobs: Sequence[TrainingJob]) -> JobTable:
    """The columns of ``jobs``."""
    if isinstance(jobs, JobBatch):
        numbers, code = jobs.numbers, jobs.option_codes
        known = [_option_numbers(options) for options in jobs.option_sets]
    else:
        numbers = number_columns(jobs)
        codes: dict[tuple[Any, ...], int] = {}
        code = np.array([codes.setdefault(options, len(codes)) for options in map(OPTIONS_OF, jobs)], dtype=np.int64)
        known = [_option_numbers(options) for options in codes]
    flags = _columns([one.flags for one in known], FLAGS)[:, code]
    others = _columns([one[1:] for one in known], len(OptionNumbers._fields) - 1)[:, code]
    return JobTable(
        **dict(zip(NUMBER_FIELDS, numbers, strict=True)), **dict(zip(OptionNumbers._fields, (flags, *others), strict=True))
    )


def _columns(rows: Sequence[Sequence[object]], width: int) -> Array:
    return np.array(rows, dtype=np.float64).reshape(len(rows), width).T.copy()
