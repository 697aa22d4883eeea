"""Computes the numbers that depend on a job's options alone: flags, bytes per element and optimizer copies.

Many jobs share a few option sets, so the numbers are computed once per set.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np

from gpumemnet.job.job_table import Array, OptionSet
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.physics.element_types import ELEMENT_BYTES, MODEL_TYPES, SCALED_PRECISIONS
from gpumemnet.physics.optimizers import OPTIMIZER_RULES, filter_copies, optimizer_copies

FLAGS: Final = 16
"""Number of columns ``is_…``."""
OPTION_NUMBERS: Final = (
    *(f"flag_{place}" for place in range(FLAGS)),
    *("input_bytes", "weight_bytes", "activation_bytes", "copy_bytes", "base_bytes"),
    *("state_copies", "temporary_copies", "loop_copies", "filter_copies"),
    *("is_autocast", "is_math", "is_checkpointed", "is_channels_last"),
)
"""The numbers of an option set: the columns ``is_…`` of :data:`gpumemnet.features.vector.TOTAL_COLUMNS` in their order, then

* ``input_bytes``, ``weight_bytes``, ``activation_bytes``, ``copy_bytes``: bytes per element, see
  :class:`gpumemnet.physics.element_types.ElementBytes`;
* ``base_bytes``: bytes per output element of a layer whose kind has no rule for it;
* ``state_copies``, ``temporary_copies``, ``loop_copies``: see :class:`gpumemnet.physics.optimizers.OptimizerCopies`;
* ``filter_copies``: optimizer state in copies of the convolutions' parameters, in addition to ``state_copies``;
* ``is_autocast``, ``is_math``, ``is_checkpointed``, ``is_channels_last``: 1 if true, else 0.
"""
_KNOWN_OPTION_SETS: Final = 4096
_KNOWN_TABLES: Final = 256


@lru_cache(maxsize=_KNOWN_TABLES)
def option_matrix(option_sets: tuple[OptionSet, ...]) -> Array:
    """The numbers of ``S`` option sets, shape ``[S, len(OPTION_NUMBERS)]``, read-only."""
    matrix = np.array([_numbers(options) for options in option_sets], dtype=np.float64)
    matrix = matrix.reshape(len(option_sets), len(OPTION_NUMBERS))
    matrix.flags.writeable = False
    return matrix


@lru_cache(maxsize=_KNOWN_OPTION_SETS)
def _numbers(options: OptionSet) -> tuple[float, ...]:
    family, optimizer, precision, _, kernel, implementation, checkpointing, channels_last, cudnn_benchmark = options
    element = ELEMENT_BYTES[precision]
    copies = optimizer_copies(optimizer, implementation)
    return (
        *(checkpointing != "none", channels_last, cudnn_benchmark),
        *(family == each for each in FAMILIES),
        *(element.is_autocast, precision in SCALED_PRECISIONS, precision in MODEL_TYPES, precision == "tf32"),
        *(copies.is_foreach, implementation == "fused", OPTIMIZER_RULES[optimizer].is_factored),
        *(kernel == "flash", kernel == "memory_efficient", kernel == "math"),
        *(element.inputs, element.weight, element.activation, element.weight_copy),
        element.uncast,
        *(copies.state, copies.temporary, copies.loop, filter_copies(optimizer)),
        *(element.is_autocast, kernel == "math", checkpointing != "none", channels_last),
    )
