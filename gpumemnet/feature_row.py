"""The feature vector of one job in plain floats, for the scheduler that asks about one job at a time.

It is the arithmetic of :mod:`gpumemnet.closed_form` and :mod:`gpumemnet.features` once more, and a property test holds the two
together.  Both earn their place: for one job of twenty layers a hundred numpy calls take several times as
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
    LOSS_TENSORS,
    MEDIUM_LIMIT,
    MEDIUM_SEGMENT,
    ROUNDING,
    SMALL_LIMIT,
    SMALL_SEGMENT,
    TYPICAL_LARGE_TENSOR,
)
from gpumemnet.job import TrainingJob
from gpumemnet.job_table import option_numbers
from gpumemnet.layers import GROUP_NAMES, GROUP_OF_KIND, KINDS, LAYER_GROUPS
from gpumemnet.saved_tensors import FULL_BYTES, KIND_RULES

_RULES: Final = {
    kind: (GROUP_NAMES.index(GROUP_OF_KIND[kind]), *rules) for kind, rules in zip(KINDS, KIND_RULES.tolist(), strict=True)
}
_OTHER_RULES: Final = _RULES["other"]
_NO_LAYERS: Final = [0.0] * (2 + 2 * len(GROUP_NAMES) + 3 * 4 + 15)
_CONVOLUTIONS: Final = GROUP_NAMES.index("conv")
_EMBEDDINGS: Final = frozenset(LAYER_GROUPS["embedding"])
_MAX_LAYERS: Final = 70


def is_quick(job: TrainingJob) -> bool:
    """Whether the loop answers for ``job``, and sooner than the arrays: not where blocks are recomputed, nor for long lists."""
    return job.checkpointing == "none" and len(job.layers) <= _MAX_LAYERS


def _packed(size: float) -> tuple[int, float]:
    """Size class of a tensor, and the bytes of segment that it costs among its likes (:func:`gpumemnet.closed_form.packed`)."""
    block = -(-size // BLOCK) * BLOCK
    if block <= SMALL_LIMIT:
        return 0, block
    if block < MEDIUM_LIMIT:
        return 1, MEDIUM_SEGMENT // (MEDIUM_SEGMENT // block)
    return (2 if block < LARGE_LIMIT else 3), -(-block // ROUNDING) * ROUNDING


def total_columns(job: TrainingJob) -> list[float]:
    """The columns of :data:`gpumemnet.features.TOTAL_COLUMNS`."""
    assert job.total_parameters is not None
    assert job.total_activations is not None
    numbers = option_numbers(job)
    batch_size, parameters, share = job.batch_size, job.total_parameters, job.trainable_share
    trained_bytes = parameters * share * numbers.weight_bytes
    return [
        *(batch_size, job.input_elements, parameters, share, job.total_activations, job.sequence_length or 0),
        *(job.gradient_accumulation, *numbers.flags, job.traced_peak_bytes or 0),
        parameters * (numbers.weight_bytes + numbers.copy_bytes),
        *(trained_bytes, trained_bytes * numbers.state_copies, trained_bytes * numbers.temporary_copies),
        batch_size * job.input_elements * numbers.input_bytes,
        job.total_activations * batch_size * numbers.activation_bytes,
    ]


def feature_row(job: TrainingJob, blas_workspace_bytes: int) -> list[float]:
    """One row of :func:`gpumemnet.features.feature_matrix`, of a job that :func:`is_quick`."""
    return total_columns(job) + (_layer_columns(job, blas_workspace_bytes) if job.layers else _NO_LAYERS)


def _layer_columns(job: TrainingJob, blas_workspace_bytes: int) -> list[float]:
    numbers = option_numbers(job)
    _, bytes_per_input, weight_bytes, _, copy_bytes, base_bytes, state, temporary, loop_copies, is_autocast, is_math, _ = numbers
    assert job.total_parameters is not None
    assert job.trainable_parameters is not None
    batch_size, positions, created = job.batch_size, job.sequence_length or 1, job.gradient_accumulation == 1
    frozen = job.total_parameters - job.trainable_parameters
    input_elements = batch_size * job.input_elements
    input_bytes = input_elements * bytes_per_input
    counts, by_group = [0.0] * len(GROUP_NAMES), [0.0] * len(GROUP_NAMES)
    chain = []
    for layer in job.layers:
        rules = _RULES.get(layer.kind, _OTHER_RULES)
        counts[rules[0]] += 1
        if not rules[1]:
            chain.append((layer, rules))
    kinds = [layer.kind for layer, _ in chain]
    sizes = _element_bytes(
        kinds, [rules for _, rules in chain], base_bytes, input_bytes / input_elements, is_autocast > 0, is_math > 0
    )

    # Forward: what each layer puts out, and what it leaves for the backward pass beside outputs.
    outputs, needed = [], []
    saved: list[int] = []
    moves: list[tuple[list[tuple[int, float]], list[tuple[int, float]], tuple[int, float] | None, int]] = []
    weights, copies, trained, largest_trained = [0.0] * 4, [0.0] * 4, [0.0] * 4, [0.0] * 4
    matrices = largest_output = largest_weight = largest_convolution = 0.0
    previous_elements, previous_bytes, previous_total = input_elements, input_bytes / input_elements, input_bytes
    cumulated = 0
    for (layer, rules), (own_bytes, taken_bytes) in zip(chain, sizes, strict=True):
        group, _, saves_input, saves_output, mask_bytes, statistics, second_share, has_bias, is_cast, _, _ = rules
        elements, parameters = layer.activations * batch_size, layer.parameters
        cumulated += parameters
        is_needed = cumulated > frozen
        total = elements * own_bytes
        own = _packed(total)
        left = []
        if is_needed:
            if saves_input:
                if taken_bytes != previous_bytes:
                    left.append(_packed(previous_elements * taken_bytes))
                elif saved:
                    saved[-1] = 1
            if mask_bytes:
                left.append(_packed(elements * mask_bytes))
            if not parameters and elements > previous_elements and layer.kind == "multiply":
                left.append(own)
        here = []
        if parameters:
            width = layer.activations / positions
            second = width if has_bias and parameters > width else parameters * second_share
            main = _packed((parameters - second) * weight_bytes)
            here.append(main)
            if second:
                side = _packed(second * weight_bytes)
                here.append(side)
                if statistics and is_needed:
                    left.append((side[0], statistics * side[1]))
            if is_cast and copy_bytes:
                size_class, amount = _packed((parameters - second) * copy_bytes)
                copies[size_class] += amount
                moves.append((left, here, (size_class, amount), group))
            else:
                moves.append((left, here, None, group))
            for size_class, amount in here:
                weights[size_class] += amount
                if is_needed:
                    trained[size_class] += amount
                    largest_trained[size_class] = max(largest_trained[size_class], amount)
            largest_weight = max(largest_weight, parameters)
        else:
            moves.append((left, here, None, group))
        outputs.append(own)
        saved.append(1 if saves_output and is_needed else 0)
        needed.append(is_needed)
        if layer.kind == "softmax":
            matrices += total
        if group == _CONVOLUTIONS:
            largest_convolution = max(largest_convolution, total + previous_total)
        largest_output = max(largest_output, total)
        previous_elements, previous_bytes, previous_total = elements, own_bytes, total

    # Backward: the fullest moment; live is what is kept up to a layer, less the gradients that are yet to come.
    kept, fullest = [0.0] * 4, [0.0] * 4
    live = [created * amount for amount in trained]
    live_total, fullest_total = sum(live), 0.0
    before_class, before_bytes = 0, 0.0
    for (own_class, own_bytes), is_saved, is_needed, (left, here, copy, group) in zip(outputs, saved, needed, moves, strict=True):
        if is_saved:
            left.append((own_class, own_bytes))
        for size_class, amount in left:
            kept[size_class] += amount
            live[size_class] += amount
            live_total += amount
            by_group[group] += amount
        if copy:
            live[copy[0]] += copy[1]
            live_total += copy[1]
        if is_needed:
            coming = [] if created else here
            moving = [*coming, (own_class, own_bytes), (before_class, before_bytes)]
            for size_class, amount in moving:
                live[size_class] += amount
                live_total += amount
            for size_class in range(4):
                if live[size_class] > fullest[size_class]:
                    fullest[size_class] = live[size_class]
            if live_total > fullest_total:
                fullest_total = live_total
            for size_class, amount in moving:
                live[size_class] -= amount
                live_total -= amount
            if created:
                for size_class, amount in here:
                    live[size_class] -= amount
                    live_total -= amount
        else:
            flowing = own_bytes + before_bytes if own_class == before_class else own_bytes
            fullest[own_class] = max(fullest[own_class], flowing)
            fullest[before_class] = max(fullest[before_class], before_bytes)
            fullest_total = max(fullest_total, own_bytes + before_bytes)
        before_class, before_bytes = own_class, own_bytes

    logits = at_loss_total = 0.0
    resident = [weights[c] + (state + (1.0 - created)) * trained[c] for c in range(4)]
    if chain:
        logits = previous_elements * (FULL_BYTES if is_autocast else previous_bytes)
        size_class, amount = _packed(logits)
        at_loss = [kept[c] + copies[c] for c in range(4)]
        at_loss[size_class] += LOSS_TENSORS * amount
        at_loss[before_class] += before_bytes * (1 - saved[-1])
        fullest = [max(a, b) for a, b in zip(fullest, at_loss, strict=True)]
        at_loss_total = sum(at_loss)
        fullest_total = max(fullest_total, at_loss_total)
        size_class, amount = _packed(input_bytes)
        resident[size_class] += amount
    step = [resident[c] + (created + temporary) * trained[c] + loop_copies * largest_trained[c] for c in range(4)]
    peak = [max(resident[c] + fullest[c], step[c]) for c in range(4)]
    return [
        *(1.0, len(job.layers), *counts, *weights, *kept, *peak, *by_group),
        *(sum(resident), at_loss_total, fullest_total, sum(step), matrices, logits, largest_convolution, 0.0),
        *(largest_output, largest_weight * weight_bytes),
        *segments(weights[2], peak, step[1], state, blas_workspace_bytes),
    ]


def _element_bytes(
    kinds: list[str],
    rules: list[tuple[float, ...]],
    base_bytes: float,
    input_element_bytes: float,
    is_autocast: bool,
    is_math: bool,
) -> list[tuple[float, float]]:
    """Bytes per element of each layer's output, and of its input as the kernel takes it."""
    if not (is_autocast or is_math):
        return [(base_bytes, base_bytes)] * len(kinds)
    sums_in_full = not _EMBEDDINGS.isdisjoint(kinds)
    sizes: list[tuple[float, float]] = []
    own = input_element_bytes
    weighed = False  # whether the layer before made attention weights, which the math kernel keeps in fp32
    for position, kind in enumerate(kinds):
        taken = rules[position][-1] if is_autocast and rules[position][-1] and not weighed else own
        scores = is_math and kind == "matmul" and kinds[position + 1 : position + 2] == ["softmax"]
        drops = is_math and kind == "dropout" and position > 0 and kinds[position - 1] == "softmax"
        weighed = drops or (is_math and kind == "softmax")
        if scores or weighed:
            own = FULL_BYTES
        elif not is_autocast:
            own = base_bytes
        elif kind == "add" and sums_in_full:
            own = FULL_BYTES
        else:
            own = rules[position][-2] or own
        sizes.append((own, taken))
    return sizes


def segments(
    large_weights: float, peak: list[float], medium_step: float, state_copies: float, blas_workspace_bytes: int
) -> tuple[float, float, float, float, float]:
    """The last five columns of :data:`gpumemnet.features.LAYER_COLUMNS`."""
    workspaces = HANDLES * blas_workspace_bytes
    pooled, own = (workspaces, 0) if blas_workspace_bytes < MEDIUM_LIMIT else (0, workspaces)
    small, medium = peak[0] + CUBLASLT_WORKSPACE, peak[1] + pooled
    small_bytes, medium_count = ceil(small / SMALL_SEGMENT) * SMALL_SEGMENT, ceil(medium / MEDIUM_SEGMENT)
    spare = max(medium_count - ceil((medium_step + pooled) / MEDIUM_SEGMENT), 0)
    return (
        small_bytes + medium_count * MEDIUM_SEGMENT + peak[2] + peak[3] + own,
        small_bytes - small,
        medium_count * MEDIUM_SEGMENT - medium,
        spare,
        min(spare, (1.0 + state_copies) * large_weights / TYPICAL_LARGE_TENSOR),
    )
