"""Computes the inputs of the networks from a table of jobs: the feature vector of the MLP-based
estimator, and the layer sequence of the transformer-based one.

The feature vector summarises a job in a fixed number of columns.  They include GPUMemNet's features
(arXiv 2602.17817, section 4: counts of layers, batch size, parameters, activations).  The others
hold bytes under the job's precision and optimizer, and the closed-form peak by size class of the
allocator.  Every column is in natural units; the networks' graphs take logarithms and standardise.

In the layer sequence, as in GPUMemNet, each token holds the type, activations and parameters of a
layer.  Activations are those of one sample, so that the sequence is the same at every batch size.
In long networks one token covers several layers: the cost of attention grows with the square of the
length, and long networks mostly repeat the same layers.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.atomic_files import shipped_json
from gpumemnet.errors import InvalidJobError
from gpumemnet.job.job_table import Array, Flags, JobTable, OptionSet
from gpumemnet.job.layers import GROUP_NAMES, LAYER_GROUPS
from gpumemnet.job.training_job import FAMILIES
from gpumemnet.physics.closed_form import IS_COMPILED, fill_columns
from gpumemnet.physics.element_types import ELEMENT_BYTES, MODEL_TYPES, SCALED_PRECISIONS
from gpumemnet.physics.network_structure import LAYER_KINDS
from gpumemnet.physics.optimizers import (
    FOREACH_COPIES,
    LOOP_COPIES,
    OPTIMIZER_RULES,
    filter_copies,
    optimizer_copies,
)
from gpumemnet.physics.saved_tensors import KIND_RULES
from gpumemnet.physics.step_memory import TOTALS, OptionNumbers, fill_totals


@dataclass(frozen=True)
class Column:
    """Name and meaning of one column of the feature vector."""

    name: str
    meaning: str


TOTAL_COLUMNS, LAYER_COLUMNS = (
    tuple(Column(name, meaning) for name, meaning in meanings.items())
    for meanings in shipped_json("predict/feature_columns.json").values()
)
"""Columns that need only the totals, and those that need the layer list."""

FEATURE_COLUMNS: Final = TOTAL_COLUMNS + LAYER_COLUMNS
FEATURE_NAMES: Final = tuple(column.name for column in FEATURE_COLUMNS)
_KIND_RULES: Final = [[float(value) for value in rule] for rule in KIND_RULES.values()]
FEATURE_SCHEMA: Final = hashlib.sha256(
    repr(
        (13, FEATURE_NAMES, LAYER_GROUPS, _KIND_RULES, ELEMENT_BYTES, FOREACH_COPIES, LOOP_COPIES)
    ).encode()
).hexdigest()[:12]
"""Hash of the columns and of the tables that they depend on; every bundle states it.  Increase the
number when a code change alters the meaning of a column."""


_WIDTH: Final = len(FEATURE_COLUMNS)
_LAYERS_AT_ONCE: Final = 2_000
"""About so many layers of short jobs in one call of the compiled closed form, which lets no other
thread run for 1 ms then."""


def feature_matrix(table: JobTable, blas_workspace_bytes: int) -> Array:
    """Computes feature vectors of ``B`` jobs, shape ``[B, F]`` with the columns
    :data:`FEATURE_COLUMNS`.

    Args:
        table: the jobs; jobs without layers have zeros in :data:`LAYER_COLUMNS`.
        blas_workspace_bytes: cuBLAS workspace per handle on the GPU of the prediction
            (:attr:`gpumemnet.gpu.DeviceProfile.blas_workspace_bytes`).
    """
    matrix = np.zeros((len(table), _WIDTH))
    if not len(table):
        return matrix
    features: Any = matrix.reshape(-1)
    numbers: Any = np.ascontiguousarray(table.numbers).reshape(
        -1
    )  # the numbers of a sliced table are not contiguous
    codes: Any = table.option_codes
    layers: list[Any] = [
        table.layer_counts,
        table.known_kinds,
        table.layer_activations,
        table.layer_parameters,
        table.layer_trains,
        table.layer_blocks,
    ]
    if not IS_COMPILED:  # uncompiled Python reads lists faster than arrays
        features, numbers, codes, *layers = (
            column.tolist() for column in (features, numbers, codes, *layers)
        )
    jobs = fill_totals(
        features, _WIDTH, numbers, codes, [option_numbers(options) for options in table.option_sets]
    )
    counts, *columns = layers
    for rows, own in _parts(table) if len(table.layer_kinds) else ():
        places = slice(rows.start * _WIDTH, rows.stop * _WIDTH)
        part = features[places]
        kinds, activations, parameters, trains, blocks = (column[own] for column in columns)
        fill_columns(
            part,
            _WIDTH,
            TOTALS,
            jobs[rows],
            counts[rows],
            kinds,
            activations,
            parameters,
            trains,
            blocks,
            blas_workspace_bytes,
        )
        features[places] = part
    if not IS_COMPILED:
        matrix[:] = np.reshape(features, matrix.shape)
    return matrix


REFERENCE_BATCH: Final = 32.0
"""Batch size of the features that do not depend on the job's own."""
_SEGMENT: Final = FEATURE_NAMES.index("segment_bytes")


def model_features(table: JobTable, blas_workspace_bytes: int) -> Array:
    """Computes the input ``features`` of a bundle's graph for ``B`` jobs, shape ``[B, 2 F]``.

    The first half are the features of :func:`feature_matrix`, with ``segment_bytes`` smoothed over
    the batch size.  When tensors pass into another size class of the allocator and share its
    segments, the closed form falls at once; real memory rises about as often as it falls there.  So
    it is taken at powers of two alone, at each the larger of the closed forms of this batch size
    and of half of it, and interpolated between them.

    The second half are the features at :data:`REFERENCE_BATCH`: what of them is a share or a ratio
    is the same at every batch size of a job.
    """
    count, sizes = len(table), table.column("batch_size")
    has_layers = table.layer_counts > 0
    lower = np.ldexp(1.0, np.frexp(sizes)[1] - 1)
    halved = (has_layers & (lower > 1.0)).nonzero()[0]
    between = (has_layers & (sizes > lower)).nonzero()[0]
    every = np.arange(count)
    rows = np.concatenate((every, every, halved, between, between))
    asked = (sizes, np.full(count, REFERENCE_BATCH), lower[halved] / 2.0, lower[between])
    found = feature_matrix(
        table.take(rows).with_numbers("batch_size", np.concatenate((*asked, lower[between] * 2.0))),
        blas_workspace_bytes,
    )
    own, reference = found[:count], found[count : 2 * count]
    at_half, at_lower, at_upper = np.split(
        found[2 * count :, _SEGMENT], [len(halved), len(halved) + len(between)]
    )
    start = own[:, _SEGMENT]
    start[between] = at_lower
    start[halved] = np.maximum(start[halved], at_half)
    share = (sizes - lower)[between] / lower[between]
    start[between] += share * np.maximum(at_upper - start[between], 0.0)
    return np.concatenate((own, reference), axis=1)


def _parts(table: JobTable) -> Iterator[tuple[slice, slice]]:
    """The rows of a table in parts of about :data:`_LAYERS_AT_ONCE` layers, each with the places of
    its layers."""
    count = len(table)
    ends = [0, *table.layer_counts.cumsum().tolist()]
    start = 0
    while start < count:
        stop = max(start + 1, bisect_right(ends, ends[start] + _LAYERS_AT_ONCE) - 1)
        yield slice(start, stop), slice(ends[start], ends[stop])
        start = stop


# The numbers of a set of options.  Many jobs share a few sets, so they are computed once per set.

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
        outputs_freed,
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
    numbers.frees_outputs_first = outputs_freed == "before_backward"
    numbers.keeps_outputs = outputs_freed == "by_next_step"
    return numbers


# The layer sequence.


MAX_TOKENS: Final = 128
"""Most tokens of a job; a longer layer list is divided into runs of equal length, one token per
run."""

SEQUENCE_COLUMNS: Final = (
    *(f"is_{group}" for group in GROUP_NAMES),
    "log_activation_bytes",
    "log_weight_bytes",
)
"""Columns of one token: the share of its layers in each group (one-hot for a single layer), log(1 +
output bytes of one sample) and log(1 + weight bytes).  Bytes are summed over the token's
layers."""


_GROUP_OF_CODE: Final = np.array([kind.group for kind in LAYER_KINDS], dtype=np.int64)


def layer_sequence(table: JobTable) -> tuple[NDArray[np.float32], Flags]:
    """Computes layer sequences of ``B`` jobs, padded with zeros to the longest, ``L`` tokens.

    Returns:
        The sequences, shape ``[B, L, F]`` with the columns :data:`SEQUENCE_COLUMNS`, and the mask
        of real tokens, ``[B, L]``.

    Raises:
        InvalidJobError: when a job has no layer list.
    """
    counts = table.layer_counts
    if not counts.all():
        raise InvalidJobError(
            "is empty: the transformer-based estimator needs the layer list, not totals alone",
            "layers",
        )
    owners = table.layer_owners
    # a slice of a large table has all of its option sets
    used, codes = np.unique(table.option_codes, return_inverse=True)
    options = [option_numbers(table.option_sets[code]) for code in used.tolist()]
    activation_bytes = np.array([each.activation_bytes for each in options])[codes]
    parameter_bytes = np.array([each.weight_bytes for each in options])[codes]
    output_bytes = table.layer_activations * activation_bytes[owners]
    weight_bytes = table.layer_parameters * parameter_bytes[owners]
    groups = _GROUP_OF_CODE[table.known_kinds]
    # a list that is too long is divided into runs of equal length
    stretch = -(-counts // MAX_TOKENS)
    tokens = -(-counts // stretch)
    first_layer, first_token = counts.cumsum() - counts, tokens.cumsum() - tokens
    position = np.arange(len(owners)) - first_layer[owners]
    token = first_token[owners] + position // stretch[owners]
    count, width = int(tokens.sum()), len(GROUP_NAMES)
    per_group = np.bincount(token * width + groups, minlength=count * width).reshape(count, width)
    mask = np.arange(int(tokens.max(initial=0))) < tokens[:, None]
    sequences = np.zeros((*mask.shape, len(SEQUENCE_COLUMNS)), dtype=np.float32)
    sequences[mask] = np.column_stack(
        [
            per_group / per_group.sum(axis=1, keepdims=True),
            np.log1p(np.bincount(token, output_bytes, minlength=count)),
            np.log1p(np.bincount(token, weight_bytes, minlength=count)),
        ]
    )
    return sequences, mask
