"""The feature vector of one job in plain floats, for the scheduler that asks about one job at a time.

It is the arithmetic of :mod:`gpumemnet.closed_form` and :mod:`gpumemnet.features` once more, and a property test holds the two
together.  Both earn their place: for one job of twenty layers some sixty numpy calls take five times as
long as this loop, and from a dozen jobs on the arrays win (``benchmarks/in_process.py`` prints both).
"""

from __future__ import annotations

from math import ceil
from typing import Final

from gpumemnet.closed_form import (
    BLOCK,
    CUBLASLT_WORKSPACE,
    HANDLES,
    LARGE_LIMIT,
    MEDIUM_LIMIT,
    MEDIUM_SEGMENT,
    ROUNDING,
    SMALL_LIMIT,
    SMALL_SEGMENT,
    TYPICAL_LARGE_TENSOR,
)
from gpumemnet.job import TrainingJob
from gpumemnet.layers import GROUP_NAMES, GROUP_OF_KIND, KINDS
from gpumemnet.physics import ELEMENT_BYTES, optimizer_copies
from gpumemnet.saved_tensors import KIND_RULES

_RULES: Final = {
    kind: (GROUP_NAMES.index(GROUP_OF_KIND[kind]), *rules) for kind, rules in zip(KINDS, KIND_RULES.tolist(), strict=True)
}
_OTHER_RULES: Final = _RULES["other"]
_NO_LAYERS: Final = [0.0] * (2 + len(GROUP_NAMES) + 3 * 4 + 7)


def _packed(size: float) -> tuple[int, float]:
    """Size class of a tensor, and the bytes of segment that it costs among its likes (:func:`gpumemnet.closed_form.packed`)."""
    block = -(-size // BLOCK) * BLOCK
    if block <= SMALL_LIMIT:
        return 0, block
    if block < MEDIUM_LIMIT:
        return 1, MEDIUM_SEGMENT / (MEDIUM_SEGMENT // block)
    return (2 if block < LARGE_LIMIT else 3), -(-block // ROUNDING) * ROUNDING


def known_amounts(job: TrainingJob) -> list[float]:
    """The columns of :data:`gpumemnet.features.TOTAL_COLUMNS` that the job states, up to ``is_cudnn_benchmark``."""
    assert job.total_parameters is not None
    assert job.total_activations is not None
    return [
        job.batch_size,
        job.input_elements,
        job.total_parameters,
        job.trainable_share,
        job.total_activations,
        job.sequence_length or 0,
        job.gradient_accumulation,
        job.checkpointing != "none",
        job.channels_last,
        job.cudnn_benchmark,
    ]


def feature_row(job: TrainingJob, blas_workspace_bytes: int) -> list[float]:
    """One row of :func:`gpumemnet.features.feature_matrix`."""
    element = ELEMENT_BYTES[job.precision]
    copies = optimizer_copies(job.optimizer, job.optimizer_implementation)
    row = known_amounts(job)
    _, _, parameters, share, activations, *_ = row
    trainable_bytes = parameters * share * element.weight
    input_bytes = job.batch_size * job.input_elements * element.inputs
    row += (
        parameters * (element.weight + element.weight_copy),
        trainable_bytes,
        trainable_bytes * copies.state,
        trainable_bytes * copies.temporary,
        input_bytes,
        activations * job.batch_size * element.activation,
    )
    return row + (_layer_features(job, input_bytes, blas_workspace_bytes) if job.layers else _NO_LAYERS)


def _layer_features(job: TrainingJob, input_bytes: int, blas_workspace_bytes: int) -> list[float]:
    element = ELEMENT_BYTES[job.precision]
    copies = optimizer_copies(job.optimizer, job.optimizer_implementation)
    batch_size, positions = job.batch_size, job.sequence_length or 1
    per_output, weight_bytes, copy_bytes = batch_size * element.activation, element.weight, element.weight_copy
    share = job.trainable_share
    created = share if job.gradient_accumulation == 1 else 0.0

    counts = [0] * len(GROUP_NAMES)
    chain = []
    for layer in job.layers:
        rules = _RULES.get(layer.kind, _OTHER_RULES)
        counts[rules[0]] += 1
        if not rules[1]:
            chain.append((layer, rules))
    weights, kept, weight_copies, moment = [0.0] * 4, [0.0] * 4, [0.0] * 4, [0.0] * 4
    live = [0.0] * 4  # kept so far, less the gradients that the backward pass has yet to create
    own_class, own_bytes, last = 0, 0.0, len(chain) - 1
    for position, (layer, rules) in enumerate(chain):
        _, _, _, saves_output, mask_bytes, statistics, second_share, has_bias, is_cast = rules
        outputs, parameters = layer.activations, layer.parameters
        previous_class, previous_bytes = own_class, own_bytes
        own_class, own_bytes = _packed(outputs * per_output)
        if saves_output or position == last or chain[position + 1][1][2]:
            kept[own_class] += own_bytes
            live[own_class] += own_bytes
        if mask_bytes:
            size_class, amount = _packed(outputs * batch_size * mask_bytes)
            kept[size_class] += amount
            live[size_class] += amount
            if live[size_class] > moment[size_class]:
                moment[size_class] = live[size_class]
        if parameters:
            second = parameters * second_share
            if has_bias and parameters > outputs / positions:
                second = outputs / positions
            main_class, main_bytes = _packed((parameters - second) * weight_bytes)
            second_class, second_bytes = _packed(second * weight_bytes) if second else (0, 0.0)
            if statistics:
                kept[second_class] += statistics * second_bytes
                live[second_class] += statistics * second_bytes
                if live[second_class] > moment[second_class]:
                    moment[second_class] = live[second_class]
            if copy_bytes and is_cast:
                size_class, amount = _packed((parameters - second) * copy_bytes)
                weight_copies[size_class] += amount
        # The gradients that flow in and out count at this moment only.
        live[own_class] += own_bytes
        live[previous_class] += previous_bytes
        if live[own_class] > moment[own_class]:
            moment[own_class] = live[own_class]
        if live[previous_class] > moment[previous_class]:
            moment[previous_class] = live[previous_class]
        live[own_class] -= own_bytes
        live[previous_class] -= previous_bytes
        if parameters:
            weights[main_class] += main_bytes
            weights[second_class] += second_bytes
            live[main_class] -= created * main_bytes
            live[second_class] -= created * second_bytes
    input_class, packed_input = _packed(input_bytes) if chain else (0, 0.0)
    step = [(1.0 + share * (1.0 + copies.state)) * weights[c] for c in range(4)]
    step[input_class] += packed_input
    peak = []
    for size_class in range(4):
        temporaries = share * copies.temporary * weights[size_class]
        after_step = temporaries + (own_bytes if size_class == own_class else 0.0)
        peak.append(step[size_class] + max(moment[size_class] + weight_copies[size_class], after_step))
        step[size_class] += temporaries
    return [
        *(1.0, len(job.layers), *counts, *weights, *kept, *peak),
        max((layer.activations for layer, _ in chain), default=0) * per_output,
        max((layer.parameters for layer, _ in chain), default=0) * weight_bytes,
        *_segments(weights[2], peak, step[1], copies.state, HANDLES * blas_workspace_bytes),
    ]


def _segments(
    large_weights: float, peak: list[float], medium_step: float, state_copies: float, workspaces: int
) -> tuple[float, float, float, float, float]:
    small, medium = peak[0] + CUBLASLT_WORKSPACE, peak[1] + workspaces
    small_bytes, medium_count = ceil(small / SMALL_SEGMENT) * SMALL_SEGMENT, ceil(medium / MEDIUM_SEGMENT)
    spare = max(medium_count - ceil((medium_step + workspaces) / MEDIUM_SEGMENT), 0)
    return (
        small_bytes + medium_count * MEDIUM_SEGMENT + peak[2] + peak[3],
        small_bytes - small,
        medium_count * MEDIUM_SEGMENT - medium,
        spare,
        min(spare, (1.0 + state_copies) * large_weights / TYPICAL_LARGE_TENSOR),
    )
