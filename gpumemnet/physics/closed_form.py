"""The peak of a training step in closed form, by size class of the caching allocator, from the layer list alone.

No event is replayed: at the backward pass of layer *i* the weights and their optimizer state live, the gradients of the layers
from *i* on, the tensors kept for the layers up to *i*, the gradient that flows in and the one that flows out.  One walk over the
layers meets every such moment (liveness as in DNNMem, ESEC/FSE '20, section 3.3).  Each tensor counts with its share of the
segments that the allocator would fill with its like (``c10/cuda/CUDACachingAllocator.cpp``), because that is what ``nvidia-smi``
sees.  Segments are never merged: what activations of 50 MiB leave free cannot hold the gradient of an embedding of 2 GiB, while
the other way round they can.  So the peak is taken for every octave of tensor sizes apart, what the optimizer's step needs comes
out of segments that are as large or larger, and the sum of what each octave holds is what the process comes to hold.

What the layer list does not say is taken as usual: frozen layers are the first ones, blocks and rotations are where the order of
layers tells them (:mod:`gpumemnet.physics.layer_roles`), the loss is a cross-entropy of the last layer's output, which the
training loop has a name for until the step ends, and a last linear layer without parameters has those of the embedding.

This module runs as it stands.  Where a compiler was at hand when the package was built, Cython has compiled it with the types of
``closed_form.pxd``, and a job takes a thirtieth of the time (``benchmarks/in_process.py``).  Hence the flat buffers with named
places, and loops instead of arrays: both forms are this text.
"""

from __future__ import annotations

from array import array
from collections.abc import MutableSequence, Sequence
from typing import TYPE_CHECKING, Final

from gpumemnet.allocator import sizes
from gpumemnet.job.layers import CODE_OF_KIND, GROUP_NAMES, GROUP_OF_KIND, KINDS, LAYER_GROUPS
from gpumemnet.physics.element_types import FULL_BYTES
from gpumemnet.physics.layer_roles import (
    BLOCK_BEGIN,
    CONSTANT,
    DEPTHWISE,
    IN_BLOCK,
    INNER_SUM,
    PASSED_ON,
    SIBLING,
    WRITTEN_OUT,
    fill_roles,
)
from gpumemnet.physics.saved_tensors import KIND_RULES, LOSS_TENSORS
from gpumemnet.units import MIB

IS_COMPILED: Final = not __file__.endswith(".py")
"""Whether this is the compiled form, which takes arrays; the other takes lists as well, and is quicker with them."""

SIZE_CLASSES: Final = ("small", "medium", "large", "huge")
"""Tensors up to 1 MiB (packed into 2 MiB segments), below 10 MiB (20 MiB segments), below 20 MiB, and above (own segments).

Features are by these; the peaks behind them by :data:`BLOCK_CLASSES`.
"""
LARGE_LIMIT: Final = 20 * MIB
CUBLASLT_WORKSPACE: Final = MIB
"""cuBLASLt's default workspace (``CUBLASLT_WORKSPACE_SIZE``, 1,024 KiB below compute capability 9.0)."""
HANDLES: Final = 2
"""cuBLAS handles of a training process: forward and backward run on different host threads."""
TYPICAL_LARGE_TENSOR: Final = 16 * MIB
"""Middle of the large size class, in logarithms."""
PADDED_IMAGE: Final = 8.0 / 3.0
"""Tensor cores read half types by eight channels; an image is taken to have three, as photographs have."""
WEIGHING_REACH: Final = 12
"""So near is what squeeze-and-excitation weighs before the product (arXiv 1709.01507: a pooling and five layers between)."""
HUGE_OCTAVES: Final = 7
"""Tensors of 20 to 40 MiB, and so on, up to those above 1,280 MiB."""
_LARGER_FROM: Final = (sizes.MINIMUM_LARGE_BYTES, *(LARGE_LIMIT << octave for octave in range(HUGE_OCTAVES)))
BLOCK_TOPS: Final = (sizes.SMALL_BYTES, *(limit - sizes.MINIMUM_BLOCK_BYTES for limit in _LARGER_FROM))
"""Largest block of each class of tensors that take over each other's segments, but the last, which has no largest."""
BLOCK_CLASSES: Final = len(BLOCK_TOPS) + 1

JOB_COLUMNS: Final = (
    "batch_size",
    "positions",
    "weight_bytes",
    "activation_bytes",
    "copy_bytes",
    "state_copies",
    "temporary_copies",
    "frozen_parameters",
    "is_created",
    "input_bytes",
    "is_autocast",
    "is_math_attention",
    "is_checkpointed",
    "loop_copies",
    "input_elements",
    "is_channels_last",
    "filter_copies",
)
"""What the closed form needs of a job beside its layers.

``positions`` is the sequence length, or 1 where there is none: a linear layer's output elements over its output width.  The bytes
are per element (:class:`gpumemnet.physics.element_types.ElementBytes`), the copies those of
:class:`gpumemnet.physics.optimizers.OptimizerCopies`.
``filter_copies`` are optimizer state of convolutions, beside ``state_copies``.  ``is_created`` says that the backward pass makes
the gradients as it goes: it does not where they are accumulated.
"""

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Amounts = MutableSequence[float] | NDArray[np.float64]
    Numbers = Sequence[float] | NDArray[np.float64]
    Codes = Sequence[int] | NDArray[np.int64]
    Places = MutableSequence[int] | NDArray[np.int64]

# The same numbers once more where the compiled form reads them all the time: closed_form.pxd makes C variables of them.
_BLOCK: Final = float(sizes.MINIMUM_BLOCK_BYTES)
_ROUNDING: Final = float(sizes.SEGMENT_ROUNDING_BYTES)
_SMALL_SEGMENT: Final = float(sizes.SMALL_SEGMENT_BYTES)
_MEDIUM_SEGMENT: Final = float(sizes.LARGE_SEGMENT_BYTES)
_MEDIUM_LIMIT: Final = float(sizes.MINIMUM_LARGE_BYTES)
_SMALL_TOP: Final = float(BLOCK_TOPS[0])
_MEDIUM_TOP: Final = float(BLOCK_TOPS[1])
_LARGE_TOP: Final = float(BLOCK_TOPS[2])
_CUBLASLT: Final = float(CUBLASLT_WORKSPACE)
_TYPICAL: Final = float(TYPICAL_LARGE_TENSOR)
_FULL: Final = float(FULL_BYTES)
_LOSS: Final = float(LOSS_TENSORS)
_HANDLES: Final = float(HANDLES)
_PADDED_IMAGE: Final = PADDED_IMAGE
_WEIGHING_REACH: Final = WEIGHING_REACH
_CLASSES: Final = BLOCK_CLASSES
_LARGEST_SIZE: Final = len(SIZE_CLASSES) - 1
_CONVOLUTION: Final = GROUP_NAMES.index("conv")
_ADD: Final = CODE_OF_KIND["add"]
_MULTIPLY: Final = CODE_OF_KIND["multiply"]
_SOFTMAX: Final = CODE_OF_KIND["softmax"]
_MATMUL: Final = CODE_OF_KIND["matmul"]
_DROPOUT: Final = CODE_OF_KIND["dropout"]
_LINEAR: Final = CODE_OF_KIND["linear"]
_CONSTANT, _INNER_SUM, _PASSED_ON, _BLOCK_BEGIN, _IN_BLOCK = CONSTANT, INNER_SUM, PASSED_ON, BLOCK_BEGIN, IN_BLOCK
_WRITTEN_OUT, _SIBLING, _DEPTHWISE = WRITTEN_OUT, SIBLING, DEPTHWISE

# What is known of each kind: the columns of KIND_RULES, and two more.
_IS_ALIAS, _SAVES_INPUT, _SAVES_OUTPUT, _MASK_BYTES, _STATISTICS = 0, 1, 2, 3, 4
_SECOND_SHARE, _HAS_BIAS, _IS_CAST, _OWN_BYTES, _TAKEN_BYTES = 5, 6, 7, 8, 9
_IS_ATTENTION, _IS_EMBEDDING = 10, 11
_RULE_WIDTH: Final = 12
_RULE_ROWS: Final = [
    (*rules, kind in LAYER_GROUPS["attention"], kind in LAYER_GROUPS["embedding"])
    for kind, rules in zip(KINDS, KIND_RULES.tolist(), strict=True)
]
_RULES: Final = array("d", [value for row in _RULE_ROWS for value in row])
GROUPS: Final = [GROUP_NAMES.index(GROUP_OF_KIND[kind]) for kind in KINDS]
"""Position of each kind's group in :data:`gpumemnet.job.layers.GROUP_NAMES`."""
_GROUP_OF_KIND: Final = array("q", GROUPS)

# Columns of a job, as in JOB_COLUMNS.
_BATCH, _POSITIONS, _WEIGHT_BYTES, _BASE_BYTES, _COPY_BYTES, _STATE, _TEMPORARY, _FROZEN = 0, 1, 2, 3, 4, 5, 6, 7
_CREATED, _INPUT_BYTES, _AUTOCAST, _MATH, _CHECKPOINTED, _LOOP, _INPUT_ELEMENTS = 8, 9, 10, 11, 12, 13, 14
_CHANNELS_LAST, _FILTER_STATE = 15, 16
_JOB_WIDTH: Final = len(JOB_COLUMNS)

# Places of the answer, as in gpumemnet.features.vector.LAYER_COLUMNS.
_COUNT_PLACE: Final = 2
_WEIGHT_PLACE: Final = _COUNT_PLACE + len(GROUP_NAMES)
_KEPT_PLACE: Final = _WEIGHT_PLACE + len(SIZE_CLASSES)
_PEAK_PLACE: Final = _KEPT_PLACE + len(SIZE_CLASSES)
_GROUP_PLACE: Final = _PEAK_PLACE + len(SIZE_CLASSES)
_SUM_PLACE: Final = _GROUP_PLACE + len(GROUP_NAMES)
ANSWER_WIDTH: Final = _SUM_PLACE + 16

# Places of the notes: sums over layers by block class, and then what is known of each layer.
_WEIGHTS: Final = 0
_TRAINED: Final = BLOCK_CLASSES
_LOOPED: Final = 2 * BLOCK_CLASSES
_KEPT: Final = 3 * BLOCK_CLASSES
_STANDING: Final = 4 * BLOCK_CLASSES
_BLOCK_KEPT: Final = 5 * BLOCK_CLASSES
_COPIES: Final = 6 * BLOCK_CLASSES
_FULLEST: Final = 7 * BLOCK_CLASSES
_FULLEST_FROZEN: Final = 8 * BLOCK_CLASSES
_PEAK: Final = 9 * BLOCK_CLASSES
_STEP: Final = 10 * BLOCK_CLASSES
_NAMED: Final = 11 * BLOCK_CLASSES
_FILTERS: Final = 12 * BLOCK_CLASSES
_LAYER_NOTES: Final = 13 * BLOCK_CLASSES
_OWN, _TAKEN, _IS_NEEDED, _IS_KEPT = 0, 1, 2, 3
_NOTE_WIDTH: Final = 4


def fill_columns(
    answers: Amounts,
    width: int,
    begin: int,
    jobs: Numbers,
    counts: Codes,
    kinds: Codes,
    activations: Numbers,
    parameters: Numbers,
    blas_workspace_bytes: float,
) -> None:
    """Write the columns :data:`gpumemnet.features.vector.LAYER_COLUMNS` of ``B`` jobs with ``N`` layers in all.

    Args:
        answers: rows of ``width`` columns, one after the other, zero where this writes: ``B * width`` numbers; those of jobs
            without layers stay zero.
        width: columns of a row.
        begin: the first column that this writes; it writes :data:`ANSWER_WIDTH`.
        jobs: the columns :data:`JOB_COLUMNS` of each job, one job after the other.
        counts: layers of each job, ``B`` numbers.
        kinds: codes of the layers' kinds, ``N`` numbers.
        activations: their output elements per sample.
        parameters: their parameter elements.
        blas_workspace_bytes: cuBLAS workspace per handle on the GPU in question.

    Raises:
        ValueError: when a buffer is too short, or a code none of a kind.
    """
    job_count = len(counts)
    layer_count = len(kinds)
    if begin < 0 or begin > width - ANSWER_WIDTH or job_count > len(answers) // width or job_count > len(jobs) // _JOB_WIDTH:
        raise ValueError("too few numbers for the jobs")
    roles = array("q", bytes(8 * layer_count))
    longest = fill_roles(roles, counts, kinds, activations, parameters)  # which looks at the layers' numbers
    chain = array("q", bytes(8 * 2 * longest))
    notes = array("d", bytes(8 * (_LAYER_NOTES + _NOTE_WIDTH * longest)))
    first = 0
    for job in range(job_count):
        count = counts[job]
        if count:
            _fill_job(
                answers,
                job * width + begin,
                jobs,
                job * _JOB_WIDTH,
                kinds,
                roles,
                activations,
                parameters,
                first,
                count,
                blas_workspace_bytes,
                chain,
                notes,
            )
        first += count


def _block_class(size: float) -> int:
    """Block class of a tensor of ``size`` bytes."""
    block = -(-size // _BLOCK) * _BLOCK
    if block <= _SMALL_TOP:
        return 0
    if block <= _MEDIUM_TOP:
        return 1
    place = 2
    top = _LARGE_TOP
    while block > top and place < _CLASSES - 1:
        place += 1
        top = 2.0 * (top + _BLOCK) - _BLOCK
    return place


def _cost(size: float, place: int) -> float:
    """Bytes of segment that a tensor of ``size`` bytes, of the block class ``place``, costs among its likes.

    One of 7 MiB costs 10: two of them fill a segment of 20 MiB.  Costs are whole bytes.
    """
    block = -(-size // _BLOCK) * _BLOCK
    if place > 1:
        return -(-block // _ROUNDING) * _ROUNDING
    if place == 1:
        return _MEDIUM_SEGMENT // (_MEDIUM_SEGMENT // block)
    return block


def _fill_job(
    answers: Amounts,
    answer: int,
    jobs: Numbers,
    job: int,
    kinds: Codes,
    roles: Codes,
    activations: Numbers,
    parameters: Numbers,
    first: int,
    count: int,
    blas_workspace_bytes: float,
    chain: Places,
    notes: Amounts,
) -> None:
    """One job: its row starts at ``answer``, its columns at ``job``, its layers at ``first``."""
    stored = 0  # layers with storage of their own: an alias is counted, and else no tensor
    for place in range(_LAYER_NOTES):
        notes[place] = 0.0
    for layer in range(first, first + count):
        kind = kinds[layer]
        answers[answer + _COUNT_PLACE + _GROUP_OF_KIND[kind]] += 1.0
        if not _RULES[kind * _RULE_WIDTH + _IS_ALIAS]:
            chain[2 * stored] = kind
            chain[2 * stored + 1] = layer
            stored += 1
    answers[answer] = 1.0
    answers[answer + 1] = count
    _note_element_bytes(jobs, job, roles, stored, chain, notes)
    cumulated = 0.0
    for at in range(stored):
        note = _LAYER_NOTES + at * _NOTE_WIDTH
        cumulated += parameters[chain[2 * at + 1]]
        notes[note + _IS_NEEDED] = 1.0 if cumulated > jobs[job + _FROZEN] else 0.0
    tied = _tied_embedding(parameters, stored, chain)
    _walk(answers, answer, jobs, job, roles, activations, parameters, stored, tied, chain, notes)
    _finish(answers, answer, jobs, job, stored, blas_workspace_bytes, notes)


def _note_element_bytes(jobs: Numbers, job: int, roles: Codes, stored: int, chain: Codes, notes: Amounts) -> None:
    """Note the bytes per element of each layer's output, and of its input as the kernel takes it.

    Autocast lowers some kinds and raises others; the rest hand on what they are given.  A sum with a residual stream that began
    with an embedding is fp32.  The math kernel computes attention weights in fp32 whatever it is given
    (``aten/src/ATen/native/transformers/attention.cpp``).
    """
    is_autocast = jobs[job + _AUTOCAST] > 0.0
    is_math = jobs[job + _MATH] > 0.0
    base = jobs[job + _BASE_BYTES]
    if not is_autocast and not is_math:
        for at in range(stored):
            note = _LAYER_NOTES + at * _NOTE_WIDTH
            notes[note + _OWN] = base
            notes[note + _TAKEN] = _FULL if roles[chain[2 * at + 1]] & _WRITTEN_OUT else base
        return
    sums_in_full = False
    for at in range(stored):
        if _RULES[chain[2 * at] * _RULE_WIDTH + _IS_EMBEDDING]:
            sums_in_full = True
    own = jobs[job + _INPUT_BYTES] / jobs[job + _INPUT_ELEMENTS]
    weighed = False  # whether the layer before made attention weights, which the math kernel keeps in fp32
    before = -1
    for at in range(stored):
        note = _LAYER_NOTES + at * _NOTE_WIDTH
        kind = chain[2 * at]
        following = chain[2 * at + 2] if at + 1 < stored else -1
        rule = kind * _RULE_WIDTH
        taken = own
        if is_autocast and _RULES[rule + _TAKEN_BYTES] and not weighed:
            taken = _RULES[rule + _TAKEN_BYTES]
        elif roles[chain[2 * at + 1]] & _WRITTEN_OUT:
            taken = _FULL
        scores = is_math and kind == _MATMUL and following == _SOFTMAX
        weighed = is_math and (kind == _SOFTMAX or (kind == _DROPOUT and before == _SOFTMAX))
        if scores or weighed:
            own = _FULL
        elif not is_autocast:
            own = base
        elif kind == _ADD and sums_in_full and not roles[chain[2 * at + 1]] & _INNER_SUM:
            own = _FULL
        elif _RULES[rule + _OWN_BYTES]:
            own = _RULES[rule + _OWN_BYTES]
        notes[note + _OWN] = own
        notes[note + _TAKEN] = taken
        before = kind


def _tied_embedding(parameters: Numbers, stored: int, chain: Codes) -> int:
    """The embedding whose weights the last layer has too; -1 where that has its own."""
    tied = -1
    if stored and chain[2 * stored - 2] == _LINEAR and not parameters[chain[2 * stored - 1]]:
        largest = 0.0
        for at in range(stored):
            count = parameters[chain[2 * at + 1]]
            if _RULES[chain[2 * at] * _RULE_WIDTH + _IS_EMBEDDING] and count > largest:
                tied = at
                largest = count
    return tied


def _keep(answers: Amounts, group: int, size: float, copies: float, is_inside: bool, notes: Amounts) -> int:
    """A tensor of ``size`` bytes is kept for the backward pass, ``copies`` times; says its block class."""
    place = _block_class(size)
    amount = copies * _cost(size, place)
    notes[_KEPT + place] += amount
    notes[(_BLOCK_KEPT if is_inside else _STANDING) + place] += amount
    answers[group] += amount
    return place


def _layout_copies(
    image: float, result: float, weight: float, element_bytes: float, is_first: bool, is_channels_last: bool
) -> float:
    """Bytes of the copies that a tensor-core convolution makes of operands that lie otherwise than it reads them.

    Those of :func:`gpumemnet.tracing.workspaces.cudnn.layout_copies`, as far as a layer list tells them: channels last lies
    right, but for a first layer's image; half types add the weight's gradient up in fp32; TF32 takes no first layer, of three
    channels.  Other algorithms than these kernels (FFT, Winograd), and GPUs without them, no layer list tells.
    """
    is_half = element_bytes < _FULL
    if is_first and not is_half:
        return 0.0
    copied = 0.0
    if is_first:
        copied = _PADDED_IMAGE * image
    elif not is_channels_last:
        copied = image
    if not is_channels_last:
        copied += result + weight
    return copied * element_bytes + (_FULL * weight if is_half else 0.0)


def _softmax_moment(
    place: int, amount: float, before_place: int, before_amount: float, mask_bytes: float, is_inside: bool, notes: Amounts
) -> float:
    """The forward pass of a softmax: scores, weights, and the math kernel's mask; says what there is in all.

    Elsewhere the backward pass holds more; here it does not where it only runs for later layers, or for no other block.  The mask
    tells rows that are masked as a whole (``_safe_softmax`` in ``aten/src/ATen/native/transformers/attention.cpp``).
    """
    mask_place = _block_class(mask_bytes)
    in_all = 0.0
    for c in range(_CLASSES):
        moment = notes[_STANDING + c] + notes[_COPIES + c]
        if is_inside:
            moment += notes[_BLOCK_KEPT + c]
        if c == place:
            moment += amount
        if c == before_place:
            moment += before_amount
        if c == mask_place:
            moment += _cost(mask_bytes, mask_place)
        notes[_FULLEST_FROZEN + c] = max(notes[_FULLEST_FROZEN + c], moment)
        in_all += moment
    return in_all


def _walk(
    answers: Amounts,
    answer: int,
    jobs: Numbers,
    job: int,
    roles: Codes,
    activations: Numbers,
    parameters: Numbers,
    stored: int,
    tied: int,
    chain: Places,
    notes: Amounts,
) -> None:
    """Every tensor of each layer, which of them stay for the backward pass, and the fullest moment of that."""
    batch_size = jobs[job + _BATCH]
    weight_bytes = jobs[job + _WEIGHT_BYTES]
    copy_bytes = jobs[job + _COPY_BYTES]
    created = jobs[job + _CREATED]
    is_autocast = jobs[job + _AUTOCAST] > 0.0
    is_checkpointed = jobs[job + _CHECKPOINTED] > 0.0
    previous_elements = jobs[job + _INPUT_ELEMENTS]
    previous_total = jobs[job + _INPUT_BYTES]
    previous_bytes = previous_total / previous_elements
    before_amount = matrices = largest_output = largest_weight = largest_convolution = blocks = total = 0.0
    fullest = fullest_frozen = shared_elements = shared_bytes = stepped = 0.0
    loop = jobs[job + _LOOP]
    before_place = highest = 0  # the highest class of any tensor that there is up to here: beyond it all are nothing
    if stored:  # what the model gives has a name in the training loop
        note = _LAYER_NOTES + (stored - 1) * _NOTE_WIDTH
        total = activations[chain[2 * stored - 1]] * batch_size * notes[note + _OWN]
        place = _block_class(total)
        notes[_NAMED + place] = _cost(total, place)
        if not notes[note + _IS_NEEDED] or not _RULES[chain[2 * stored - 2] * _RULE_WIDTH + _SAVES_OUTPUT]:
            notes[_STANDING + place] += notes[_NAMED + place]  # else it is kept anyway
            highest = place
    # A tied weight has its gradient from the start of the backward pass on, and another for a moment at the end of it.
    tied_place = 0
    tied_amount = 0.0
    if tied >= 0:
        count = parameters[chain[2 * tied + 1]]
        if notes[_LAYER_NOTES + tied * _NOTE_WIDTH + _IS_NEEDED]:
            tied_place = _block_class(count * weight_bytes)
            tied_amount = created * _cost(count * weight_bytes, tied_place)
            notes[_STANDING + tied_place] += tied_amount
            highest = max(highest, tied_place)
    for at in range(stored):
        note = _LAYER_NOTES + at * _NOTE_WIDTH
        kind, layer = chain[2 * at], chain[2 * at + 1]
        role = roles[layer]
        rule = kind * _RULE_WIDTH
        group = _GROUP_OF_KIND[kind]
        own_bytes = notes[note + _OWN]
        taken_bytes = notes[note + _TAKEN]
        is_needed = notes[note + _IS_NEEDED] > 0.0
        is_inside = is_checkpointed and (role & _IN_BLOCK) > 0
        elements = activations[layer] * batch_size
        count = parameters[layer]
        total = elements * own_bytes
        place = _block_class(total)
        amount = _cost(total, place)
        kept_by = answer + _GROUP_PLACE + group
        highest = max(highest, place)
        if is_inside and role & _BLOCK_BEGIN:
            for c in range(_CLASSES):
                notes[_BLOCK_KEPT + c] = 0.0

        # What it leaves for the backward pass; its output where it needs that itself, or the next layer its input.
        is_saved = is_needed and _RULES[rule + _SAVES_OUTPUT] > 0.0
        ends_block = is_inside
        if at + 1 < stored:
            following = chain[2 * at + 2] * _RULE_WIDTH
            beyond = roles[chain[2 * at + 3]]
            ends_block = is_inside and ((beyond & _BLOCK_BEGIN) > 0 or not beyond & _IN_BLOCK)
            if not is_saved and notes[note + _NOTE_WIDTH + _IS_NEEDED] and not role & _PASSED_ON:
                is_saved = _RULES[following + _SAVES_INPUT] > 0.0 and notes[note + _NOTE_WIDTH + _TAKEN] == own_bytes
        notes[note + _IS_KEPT] = 1.0 if is_saved else 0.0
        if is_saved:
            _keep(answers, kept_by, total, 1.0, is_inside, notes)
        if kind == _LINEAR and not role & _SIBLING:
            shared_elements = previous_elements
            shared_bytes = previous_bytes
        second = _RULES[rule + _SECOND_SHARE] * count
        if _RULES[rule + _HAS_BIAS]:
            second = activations[layer] / jobs[job + _POSITIONS]
            if count <= second:
                second = 0.0
        if is_needed:
            if _RULES[rule + _SAVES_INPUT] and taken_bytes != previous_bytes and not role & _CONSTANT:
                highest = max(highest, _keep(answers, kept_by, previous_elements * taken_bytes, 1.0, is_inside, notes))
            if role & _SIBLING and taken_bytes != shared_bytes:
                highest = max(highest, _keep(answers, kept_by, shared_elements * taken_bytes, 1.0, is_inside, notes))
            if _RULES[rule + _MASK_BYTES]:
                highest = max(highest, _keep(answers, kept_by, elements * _RULES[rule + _MASK_BYTES], 1.0, is_inside, notes))
            if kind == _MULTIPLY and not count and elements > previous_elements and not role & _CONSTANT:
                source = at - 1  # what is weighed by channel; the weights are the layer before
                nearest = max(at - _WEIGHING_REACH, -1)
                while source > nearest and activations[chain[2 * source + 1]] != activations[layer]:
                    source -= 1
                if source == nearest or not notes[_LAYER_NOTES + source * _NOTE_WIDTH + _IS_KEPT]:
                    _keep(answers, kept_by, total, 1.0, is_inside, notes)
            if _RULES[rule + _STATISTICS] and second:
                _keep(answers, kept_by, second * weight_bytes, _RULES[rule + _STATISTICS], is_inside, notes)

        if tied >= 0 and at + 1 == stored and copy_bytes:
            copy_place = _block_class(parameters[chain[2 * tied + 1]] * copy_bytes)
            notes[_COPIES + copy_place] += _cost(parameters[chain[2 * tied + 1]] * copy_bytes, copy_place)
            highest = max(highest, copy_place)

        # Its parameters: the main tensor, and a bias or the shift of a norm.
        main_place = second_place = 0
        main_amount = second_amount = 0.0
        if count:
            main_place = _block_class((count - second) * weight_bytes)
            main_amount = _cost((count - second) * weight_bytes, main_place)
            second_place = _block_class(second * weight_bytes)
            second_amount = _cost(second * weight_bytes, second_place)
            highest = max(highest, main_place, second_place)
            if _RULES[rule + _IS_CAST] and copy_bytes:
                copy_place = _block_class((count - second) * copy_bytes)
                notes[_COPIES + copy_place] += _cost((count - second) * copy_bytes, copy_place)
            notes[_WEIGHTS + main_place] += main_amount
            notes[_WEIGHTS + second_place] += second_amount
            largest_weight = max(largest_weight, count)
        if ends_block:
            blocks += 1.0
            if is_needed and at + 1 < stored:  # the last output stands by its name
                notes[_STANDING + place] += amount

        # The moment of its backward pass: gradients of later layers are there, unless they are from the start; so what it holds
        # is noted less the gradients of all layers, which are not known yet.
        moment_total = 0.0
        copies_place = 0
        copies_amount = 0.0
        if group == _CONVOLUTION and not role & _DEPTHWISE:
            copies = _layout_copies(previous_elements, elements, count, taken_bytes, at == 0, jobs[job + _CHANNELS_LAST] > 0.0)
            copies_place = _block_class(copies)
            copies_amount = _cost(copies, copies_place)
            highest = max(highest, copies_place)
        extra = 0.0
        cast_place = mask_place = 0
        cast_amount = mask_amount = 0.0
        if not is_needed:  # it has a forward pass alone: with a cast copy of its input, and a mask, which go at once
            if taken_bytes != previous_bytes:
                cast_place = _block_class(previous_elements * taken_bytes)
                cast_amount = _cost(previous_elements * taken_bytes, cast_place)
            if _RULES[rule + _MASK_BYTES]:
                mask_place = _block_class(elements * _RULES[rule + _MASK_BYTES])
                mask_amount = _cost(elements * _RULES[rule + _MASK_BYTES], mask_place)
            highest = max(highest, cast_place, mask_place)
        else:
            is_product = kind == _MULTIPLY and not role & _CONSTANT
            if is_product or kind == _SOFTMAX:  # a gradient for each factor; output times gradient, which its kernel wants first
                extra = 1.0
            elif _RULES[rule + _IS_ATTENTION]:  # three, and their sums in fp32 (``flash_attn/flash_api.cpp``, ``dq_accum``)
                extra = 2.0 + (_FULL / own_bytes if own_bytes < _FULL else 0.0)
        for c in range(highest + 1):
            moment = 0.0
            if is_needed:
                moment = notes[_STANDING + c] + notes[_COPIES + c] - created * notes[_TRAINED + c]
                if is_inside:
                    moment += notes[_BLOCK_KEPT + c]
                if not created:
                    if c == main_place:
                        moment += main_amount
                    if c == second_place:
                        moment += second_amount
            if c == place:
                moment += amount
                moment += extra * amount
            if c == before_place:
                moment += before_amount
            if c == cast_place:
                moment += cast_amount
            if c == mask_place:
                moment += mask_amount
            if c == copies_place:
                moment += copies_amount
            moment_total += moment
            if is_needed:
                notes[_FULLEST + c] = max(notes[_FULLEST + c], moment)
            else:
                notes[_FULLEST_FROZEN + c] = max(notes[_FULLEST_FROZEN + c], moment)
        if is_needed:
            fullest = max(fullest, moment_total)
            notes[_TRAINED + main_place] += main_amount
            notes[_TRAINED + second_place] += second_amount
            if group == _CONVOLUTION:
                notes[_FILTERS + main_place] += jobs[job + _FILTER_STATE] * main_amount
            if count and loop:
                looped = (loop - 1.0) * main_amount + stepped
                if looped > notes[_LOOPED]:
                    notes[_LOOPED] = looped
                    notes[_LOOPED + 1] = main_place
                stepped = second_amount if second else main_amount
        else:
            fullest_frozen = max(fullest_frozen, moment_total)

        if kind == _SOFTMAX:
            matrices += total
            mask = elements if jobs[job + _MATH] > 0.0 else 0.0
            moment_total = _softmax_moment(
                place, 0.0 if is_saved else amount, before_place, before_amount, mask, is_inside, notes
            )
            fullest_frozen = max(fullest_frozen, moment_total)
        if group == _CONVOLUTION:
            largest_convolution = max(largest_convolution, total + previous_total)
        largest_output = max(largest_output, total)
        previous_elements, previous_bytes, previous_total = elements, own_bytes, total
        before_place, before_amount = place, amount

    notes[_STANDING + tied_place] -= tied_amount
    trained_total = 0.0
    for c in range(_CLASSES):
        trained_total += notes[_TRAINED + c]
        moment = notes[_FULLEST + c] + created * notes[_TRAINED + c]
        notes[_FULLEST + c] = max(moment, notes[_FULLEST_FROZEN + c])
        notes[_STANDING + c] += notes[_COPIES + c]  # from here on what is there at the loss
    logits = 0.0
    if stored:
        logits = previous_elements * (_FULL if is_autocast else previous_bytes)
        place = _block_class(logits)
        if is_autocast and previous_bytes < _FULL:  # log-probabilities in half precision, a copy in fp32, and its gradient
            notes[_STANDING + place] += (_LOSS - 1.0) * _cost(logits, place)
            notes[_STANDING + before_place] += before_amount
        else:
            notes[_STANDING + place] += _LOSS * _cost(logits, place)
    sums = answer + _SUM_PLACE
    answers[sums + 2] = max(fullest + created * trained_total, fullest_frozen)
    answers[sums + 5] = matrices
    answers[sums + 6] = logits
    answers[sums + 7] = largest_convolution
    answers[sums + 8] = blocks
    answers[sums + 9] = largest_output
    answers[sums + 10] = largest_weight * weight_bytes


def _finish(
    answers: Amounts, answer: int, jobs: Numbers, job: int, stored: int, blas_workspace_bytes: float, notes: Amounts
) -> None:
    """The peak of each block class, what the step takes of larger ones, and whole segments."""
    created, state = jobs[job + _CREATED], jobs[job + _STATE]
    resident_total = loss_total = step_total = 0.0
    input_place = _block_class(jobs[job + _INPUT_BYTES])
    for c in range(_CLASSES):
        trained, loss = notes[_TRAINED + c], notes[_STANDING + c]
        resident = notes[_WEIGHTS + c] + (state + 1.0 - created) * trained + notes[_FILTERS + c]
        if c == input_place and stored:
            resident += _cost(jobs[job + _INPUT_BYTES], input_place)
        step = resident + notes[_NAMED + c] + (created + jobs[job + _TEMPORARY]) * trained
        if c == notes[_LOOPED + 1]:
            step += notes[_LOOPED]
        notes[_STEP + c] = step
        notes[_PEAK + c] = resident + max(notes[_FULLEST + c], loss)
        resident_total += resident
        loss_total += loss
        step_total += step
    # What the step needs beyond the backward pass in a class comes out of what larger classes have free by then, but for the
    # smallest, which has a pool of its own; the rest is new.
    beyond = new = 0.0
    for c in range(_CLASSES - 1, 0, -1):
        beyond += notes[_STEP + c] - notes[_PEAK + c]
        notes[_PEAK + c] += max(beyond, new) - new
        new = max(beyond, new)
    notes[_PEAK] = max(notes[_PEAK], notes[_STEP])
    for c in range(_CLASSES):
        size = min(c, _LARGEST_SIZE)
        answers[answer + _WEIGHT_PLACE + size] += notes[_WEIGHTS + c]
        answers[answer + _KEPT_PLACE + size] += notes[_KEPT + c]
        answers[answer + _PEAK_PLACE + size] += notes[_PEAK + c]
    sums = answer + _SUM_PLACE
    backward = max(answers[sums + 2], loss_total)
    answers[sums] = resident_total
    answers[sums + 1] = loss_total
    answers[sums + 2] = backward
    answers[sums + 3] = step_total
    answers[sums + 4] = max(resident_total + backward, step_total)

    # Workspaces below 10 MiB lie among the medium tensors, larger ones in segments of their own.
    own = _HANDLES * blas_workspace_bytes
    pooled = 0.0
    if blas_workspace_bytes < _MEDIUM_LIMIT:
        pooled, own = own, 0.0
    peak = answer + _PEAK_PLACE
    small = answers[peak] + _CUBLASLT
    medium = answers[peak + 1] + pooled
    small_bytes = -(-small // _SMALL_SEGMENT) * _SMALL_SEGMENT
    medium_count = -(-medium // _MEDIUM_SEGMENT)
    spare = max(medium_count + (-(notes[_STEP + 1] + pooled) // _MEDIUM_SEGMENT), 0.0)
    answers[sums + 11] = small_bytes + medium_count * _MEDIUM_SEGMENT + answers[peak + 2] + answers[peak + 3] + own
    answers[sums + 12] = small_bytes - small
    answers[sums + 13] = medium_count * _MEDIUM_SEGMENT - medium
    answers[sums + 14] = spare
    answers[sums + 15] = min(spare, (1.0 + state) * answers[answer + _WEIGHT_PLACE + 2] / _TYPICAL)
