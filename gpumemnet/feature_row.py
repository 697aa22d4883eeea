"""The feature vector of one job in plain floats, for the scheduler that asks about one job at a time.

It is the arithmetic of :mod:`gpumemnet.closed_form` and :mod:`gpumemnet.features` once more, and a property test holds the two
together.  Both earn their place: for one job of twenty layers a hundred numpy calls take six times as long as this loop, and
from a dozen jobs or 160 layers on the arrays win (``benchmarks/in_process.py`` prints both).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import ceil
from typing import Final

from gpumemnet.closed_form import (
    BLOCK,
    BLOCK_CLASSES,
    BLOCK_TOPS,
    CUBLASLT_WORKSPACE,
    HANDLES,
    LOSS_TENSORS,
    MEDIUM_LIMIT,
    MEDIUM_SEGMENT,
    ROUNDING,
    SIZE_CLASSES,
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
_NO_LAYERS: Final = [0.0] * (2 + 2 * len(GROUP_NAMES) + 3 * len(SIZE_CLASSES) + 16)
_CONVOLUTIONS: Final = GROUP_NAMES.index("conv")
_EMBEDDINGS: Final = frozenset(LAYER_GROUPS["embedding"])
_CLASSES: Final = range(BLOCK_CLASSES)
_LARGEST: Final = len(SIZE_CLASSES) - 1
QUICK_LAYERS: Final = 160
"""Up to so many layers in all the loop is quicker than the arrays."""


def is_quick(job: TrainingJob) -> bool:
    """Whether the loop answers for ``job``, and sooner than the arrays: not where blocks are recomputed, nor for long lists."""
    return job.checkpointing == "none" and len(job.layers) <= QUICK_LAYERS


class _Packing(dict[float, tuple[int, float]]):
    """Size of a tensor → its block class, and the bytes of segment that it costs among its likes.

    It is :func:`gpumemnet.closed_form.packed`, and remembers: most tensors of a job are as large as another one.
    """

    def __missing__(self, size: float) -> tuple[int, float]:
        block = -(-size // BLOCK) * BLOCK
        block_class = bisect_left(BLOCK_TOPS, block)
        if block_class > 1:
            block = -(-block // ROUNDING) * ROUNDING
        elif block_class:
            block = MEDIUM_SEGMENT // (MEDIUM_SEGMENT // block)
        cost = self[size] = block_class, block
        return cost


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
    for kind, activations, parameters in job.layers:
        rules = _RULES.get(kind, _OTHER_RULES)
        counts[rules[0]] += 1
        if not rules[1]:
            chain.append((kind, activations, parameters, rules))
    sizes = _element_bytes(chain, base_bytes, bytes_per_input, is_autocast > 0, is_math > 0)

    # Forward: what each layer puts out, and what it leaves for the backward pass beside outputs.
    outputs, needed = [], []
    saved: list[int] = []
    moves: list[tuple[list[tuple[int, float]], list[tuple[int, float]], tuple[int, float] | None, int]] = []
    weights, copies, trained, largest_trained = ([0.0] * BLOCK_CLASSES for _ in range(4))
    matrices = largest_output = largest_weight = largest_convolution = 0.0
    previous_elements, previous_bytes, previous_total = input_elements, bytes_per_input, input_bytes
    cumulated = 0
    packed = _Packing()
    for (kind, activations, parameters, rules), (own_bytes, taken_bytes) in zip(chain, sizes, strict=True):
        group, _, saves_input, saves_output, mask_bytes, statistics, second_share, has_bias, is_cast, _, _ = rules
        elements = activations * batch_size
        cumulated += parameters
        is_needed = cumulated > frozen
        total = elements * own_bytes
        own = packed[total]
        left, here, copy = [], [], None
        if is_needed:
            if saves_input:
                if taken_bytes != previous_bytes:
                    left.append(packed[previous_elements * taken_bytes])
                elif saved:
                    saved[-1] = 1
            if mask_bytes:
                left.append(packed[elements * mask_bytes])
            if not parameters and elements > previous_elements and kind == "multiply":
                left.append(own)
        if parameters:
            width = activations / positions
            second = width if has_bias and parameters > width else parameters * second_share
            here.append(packed[(parameters - second) * weight_bytes])
            if second:
                side = packed[second * weight_bytes]
                here.append(side)
                if statistics and is_needed:
                    left.append((side[0], statistics * side[1]))
            if is_cast and copy_bytes:
                copy = packed[(parameters - second) * copy_bytes]
                copies[copy[0]] += copy[1]
            for place, amount in here:
                weights[place] += amount
                if is_needed:
                    trained[place] += amount
                    if amount > largest_trained[place]:
                        largest_trained[place] = amount
            if parameters > largest_weight:
                largest_weight = parameters
        moves.append((left, here, copy, group))
        outputs.append(own)
        saved.append(1 if saves_output and is_needed else 0)
        needed.append(is_needed)
        if kind == "softmax":
            matrices += total
        if group == _CONVOLUTIONS and total + previous_total > largest_convolution:
            largest_convolution = total + previous_total
        if total > largest_output:
            largest_output = total
        previous_elements, previous_bytes, previous_total = elements, own_bytes, total

    # Backward: the fullest moment; live is what is kept up to a layer, less the gradients that are yet to come.
    kept, fullest = [0.0] * BLOCK_CLASSES, [0.0] * BLOCK_CLASSES
    live = [created * amount for amount in trained]
    live_total, fullest_total = sum(live), 0.0
    before_class, before_bytes = 0, 0.0
    is_first = True  # of the layers that a gradient reaches; later ones are fuller only where they add something
    for (own_class, own_bytes), is_saved, is_needed, (left, here, copy, group) in zip(outputs, saved, needed, moves, strict=True):
        if is_saved:
            left.append((own_class, own_bytes))
        for place, amount in left:
            kept[place] += amount
            live[place] += amount
            live_total += amount
            by_group[group] += amount
        if copy:
            live[copy[0]] += copy[1]
            live_total += copy[1]
        flowing = own_bytes + before_bytes
        if is_needed:
            if not created:  # the gradient of the layer itself comes on top of those that are there
                for place, amount in here:
                    live[place] += amount
                    live_total += amount
            live[own_class] += own_bytes
            live[before_class] += before_bytes
            if copy or is_first or not created:
                changed: Iterable[int] = _CLASSES
            else:
                changed = (own_class, before_class, *[place for place, _ in left])
            is_first = False
            for place in changed:
                if live[place] > fullest[place]:
                    fullest[place] = live[place]
            if live_total + flowing > fullest_total:
                fullest_total = live_total + flowing
            live[own_class] -= own_bytes
            live[before_class] -= before_bytes
            for place, amount in here:
                live[place] -= amount
                live_total -= amount
        else:
            together = flowing if own_class == before_class else own_bytes
            fullest[own_class] = max(fullest[own_class], together)
            fullest[before_class] = max(fullest[before_class], before_bytes)
            fullest_total = max(fullest_total, flowing)
        before_class, before_bytes = own_class, own_bytes

    logits = 0.0
    resident, at_loss, step, peak = ([0.0] * BLOCK_CLASSES for _ in range(4))
    if chain:
        logits = previous_elements * (FULL_BYTES if is_autocast else previous_bytes)
        place, amount = packed[logits]
        at_loss[place] = LOSS_TENSORS * amount
        if not (saved[-1] or is_autocast):
            at_loss[before_class] += before_bytes
        place, amount = packed[input_bytes]
        resident[place] = amount
    standing, passing = state + (1.0 - created), created + temporary
    beyond = new = 0.0
    for c in reversed(_CLASSES):
        resident[c] += weights[c] + standing * trained[c]
        step[c] = resident[c] + passing * trained[c] + loop_copies * largest_trained[c]
        at_loss[c] += kept[c] + copies[c]
        peak[c] = max(resident[c] + fullest[c], resident[c] + at_loss[c])
        # The step takes what larger classes have free; what it needs on top is new (closed_form.held).
        beyond = step[c] - peak[c] + (beyond if c else 0.0)
        before, new = new if c else 0.0, max(beyond, new if c else 0.0)
        peak[c] += new - before
    resident_total, at_loss_total, step_total = sum(resident), sum(at_loss), sum(step)
    fullest_total = max(fullest_total, at_loss_total)
    peaks = _by_size_class(peak)
    return [
        *(1.0, len(job.layers), *counts, *_by_size_class(weights), *_by_size_class(kept), *peaks, *by_group),
        *(resident_total, at_loss_total, fullest_total, step_total, max(resident_total + fullest_total, step_total)),
        *(matrices, logits, largest_convolution, 0.0, largest_output, largest_weight * weight_bytes),
        *segments(weights[2], peaks, step[1], state, blas_workspace_bytes),
    ]


def _by_size_class(amounts: list[float]) -> list[float]:
    """Amounts by block class added up by size class."""
    return [*amounts[:_LARGEST], sum(amounts[_LARGEST:])]


def _element_bytes(
    chain: Sequence[tuple[str, int, int, tuple[float, ...]]],
    base_bytes: float,
    input_element_bytes: float,
    is_autocast: bool,
    is_math: bool,
) -> Sequence[tuple[float, float]]:
    """Bytes per element of each layer's output, and of its input as the kernel takes it."""
    if not (is_autocast or is_math):
        return [(base_bytes, base_bytes)] * len(chain)
    kinds = [kind for kind, _, _, _ in chain]
    sums_in_full = not _EMBEDDINGS.isdisjoint(kinds)
    sizes: list[tuple[float, float]] = []
    own = input_element_bytes
    weighed = False  # whether the layer before made attention weights, which the math kernel keeps in fp32
    for position, (kind, _, _, rules) in enumerate(chain):
        taken = rules[-1] if is_autocast and rules[-1] and not weighed else own
        if is_math:
            scores = kind == "matmul" and kinds[position + 1 : position + 2] == ["softmax"]
            weighed = kind == "softmax" or (kind == "dropout" and position > 0 and kinds[position - 1] == "softmax")
        else:
            scores = False
        if scores or weighed:
            own = FULL_BYTES
        elif not is_autocast:
            own = base_bytes
        elif kind == "add" and sums_in_full:
            own = FULL_BYTES
        else:
            own = rules[-2] or own
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
