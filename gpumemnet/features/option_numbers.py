"""Computes the numbers that depend on a job's options alone: flags, bytes per element and optimizer
copies.

Many jobs share a few option sets, so the numbers are computed once per set.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from gpumemnet.features.totals import OptionNumbers
from gpumemnet.job.job_table import OptionSet
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.physics.element_types import ELEMENT_BYTES, MODEL_TYPES, SCALED_PRECISIONS
from gpumemnet.physics.optimizers import OPTIMIZER_RULES, filter_copies, optimizer_copies

_KNOWN_OPTION_SETS: Final = 4096


@lru_cache(maxsize=_KNOWN_OPTION_SETS)
def option_numbers(options: OptionSet) -> OptionNumbers:
    """Computes the numbers of one option set; they are cached, and must not be written."""
    (
        family,
        optimizer,
        precision,
        _,
        kernel,
        implementation,
        checkpointing,
        channels_last,
        cudnn_benchmark,
    ) = options
    element = ELEMENT_BYTES[precision]
    copies = optimizer_copies(optimizer, implementation)
    numbers = OptionNumbers()
    flags = (
        *(checkpointing != "none", channels_last, cudnn_benchmark),
        *(family == each for each in FAMILIES),
        *(
            element.is_autocast,
            precision in SCALED_PRECISIONS,
            precision in MODEL_TYPES,
            precision == "tf32",
        ),
        *(copies.is_foreach, implementation == "fused", OPTIMIZER_RULES[optimizer].is_factored),
        *(kernel == "flash", kernel == "memory_efficient", kernel == "math"),
    )
    numbers.flags = [float(flag) for flag in flags]
    numbers.input_bytes = element.inputs
    numbers.weight_bytes = element.weight
    numbers.activation_bytes = element.activation
    numbers.copy_bytes = element.weight_copy
    numbers.uncast_bytes = element.uncast
    numbers.state_copies = copies.state
    numbers.temporary_copies = copies.temporary
    numbers.loop_copies = copies.loop
    numbers.filter_copies = filter_copies(optimizer)
    numbers.is_autocast = element.is_autocast
    numbers.is_math_attention = kernel == "math"
    numbers.is_checkpointed = checkpointing != "none"
    numbers.is_channels_last = channels_last
    return numbers
