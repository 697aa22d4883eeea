"""The peak of a training step in closed form: computed from the layer list alone, without replaying
events.

The closed form walks over the layers once.  For the backward pass of layer *i* it adds up what is
in memory then (liveness as in DNNMem, ESEC/FSE '20, section 3.3):

* the weights and their optimizer state;
* the gradients of layer *i* and of all later ones;
* the tensors that layer *i* and all earlier ones keep for their backward pass;
* the gradient that flows into the layer, and the one that flows out.

Each tensor counts with its cost in segments, in the class of its block
(:mod:`gpumemnet.physics.step_memory`).  Segments are never merged: what activations of 50 MiB leave
free cannot hold the gradient of an embedding of 2 GiB.  So each class has its own peak.  What the
optimizer's step needs comes out of segments that are as large or larger.  The sum over the classes
is what the process holds in the end.

A layer list leaves some things open.  These are assumed:

* of the layers that do not say whether they train, the first ones are frozen;
* rotations, and blocks where not all layers say theirs, are where the order of layers shows them
  (:mod:`gpumemnet.physics.network_structure`);
* the loss is a cross-entropy of the last layer's output, to which the training loop holds a
  reference until the step ends;
* a last linear layer without parameters shares those of the embedding.

:mod:`gpumemnet.physics.network_structure` has the records of the layers, and
:mod:`gpumemnet.physics.step_memory` what a step holds and the columns that are made of it.

Cython compiles this module with the types of ``closed_form.pxd``; a job then takes a thirtieth of
the time (``benchmarks/in_process.py``).  Without a compiler it runs as it is.  Hence records of
numbers, and loops instead of arrays.
"""

from __future__ import annotations

from time import sleep
from typing import TYPE_CHECKING, Final

from gpumemnet.physics.element_types import (
    FULL_BYTES,
    IMAGE_CHANNELS,
    PADDED_IMAGE,
    TF32_SMALLEST_CHANNELS,
)
from gpumemnet.physics.network_structure import (
    LAYER_KINDS,
    Layer,
    LayerKind,
    note_element_types,
    note_structure,
    note_tensor_sizes,
)
from gpumemnet.physics.saved_tensors import LOSS_TENSORS
from gpumemnet.physics.step_memory import (
    BLOCK_CLASSES,
    COLUMNS,
    JobNumbers,
    StepMemory,
    add_frozen_moment,
    block_bytes,
    class_of_block,
    find_peaks,
    segment_cost,
    write_columns,
)

if TYPE_CHECKING:
    from gpumemnet.physics.step_memory import Codes, MutableNumbers, Numbers

IS_COMPILED: Final = not __file__.endswith(".py")
"""Whether this module is compiled; the compiled form takes arrays, the other form takes lists too
and is faster with them."""

EXCITATION_REACH: Final = 12
"""Largest distance from what squeeze-and-excitation weighs to the product: a pooling and five
layers (arXiv 1709.01507)."""
# The same numbers once more where the compiled form reads them all the time: closed_form.pxd makes
# C variables of them.
_FULL: Final = float(FULL_BYTES)
_LOSS: Final = float(LOSS_TENSORS)
_PADDED_IMAGE: Final = PADDED_IMAGE
_TF32_READS_IMAGES: Final = IMAGE_CHANNELS >= TF32_SMALLEST_CHANNELS
_REACH: Final = EXCITATION_REACH
_LAYERS_AT_ONCE: Final = 500
"""After so many layers of a job, other threads may run: compiled code does not stop for them by
itself."""
_CLASSES: Final = BLOCK_CLASSES
_COLUMNS: Final = COLUMNS
_KINDS: Final = LAYER_KINDS
_NO_CLASS: Final = list((0.0,) * BLOCK_CLASSES)


def fill_columns(
    features: MutableNumbers,
    width: int,
    begin: int,
    jobs: list[JobNumbers],
    counts: Codes,
    kinds: Codes,
    activations: Numbers,
    parameters: Numbers,
    trains: Codes,
    blocks: Codes,
    blas_workspace_bytes: float,
) -> None:
    """Writes the columns :data:`gpumemnet.predict.features.LAYER_COLUMNS` of ``B`` jobs with ``N``
    layers in all.

    Args:
        features: rows of ``width`` columns, one after the other: ``B * width`` numbers; those of
            jobs without layers stay as they are.
        width: columns of a row.
        begin: the first column that this writes; it writes :data:`COLUMNS`.
        jobs: the numbers of the ``B`` jobs.
        counts: layers of each job, ``B`` numbers.
        kinds: codes of the layers' kinds, ``N`` numbers.
        activations: their output elements per sample.
        parameters: their parameter elements.
        trains, blocks: whether they train, and their checkpointed blocks, as in
            :class:`~gpumemnet.job.job_table.JobTable`.
        blas_workspace_bytes: cuBLAS workspace per handle on the GPU of the prediction.

    Raises:
        ValueError: if a buffer is too short, or a code is not the code of a kind.
    """
    job_count = len(counts)
    layer_count = len(kinds)
    if (
        begin < 0
        or begin > width - _COLUMNS
        or job_count > len(features) // width
        or job_count > len(jobs)
    ):
        raise ValueError("too few numbers for the jobs")
    if (
        len(activations) < layer_count
        or len(parameters) < layer_count
        or len(trains) < layer_count
        or len(blocks) < layer_count
    ):
        raise ValueError("too few numbers for the layers")
    for at in range(layer_count):
        if not 0 <= kinds[at] < len(_KINDS):
            raise ValueError("a code in `kinds` is not that of a layer kind")
    longest = 0
    left = layer_count
    for row in range(job_count):
        count = counts[row]
        if count < 0 or count > left:
            raise ValueError("`counts` does not fit the number of layers")
        longest = max(longest, count)
        left -= count
    records = [Layer() for _ in range(longest)]
    batch = Layer()
    memory = StepMemory()
    first = 0
    for row in range(job_count):
        count = counts[row]
        if count:
            job = jobs[row]
            memory.clear()
            layers = _stored_layers(
                records, kinds, activations, parameters, trains, blocks, first, count, memory
            )
            _walk_layers(job, batch, layers, memory)
            find_peaks(job, memory)
            write_columns(features, row * width + begin, job, memory, blas_workspace_bytes)
        first += count


def _stored_layers(
    records: list[Layer],
    kinds: Codes,
    activations: Numbers,
    parameters: Numbers,
    trains: Codes,
    blocks: Codes,
    first: int,
    count: int,
    memory: StepMemory,
) -> list[Layer]:
    """Describes the layers from ``first`` on whose output has storage of its own: an alias is
    counted, and is no tensor."""
    stored = 0
    for at in range(first, first + count):
        kind: LayerKind = _KINDS[kinds[at]]
        memory.group_counts[kind.group] += 1.0
        if not kind.is_alias:
            layer = records[stored]
            layer.describe(kind, activations[at], parameters[at], trains[at], blocks[at])
            stored += 1
    memory.layer_count = count
    return records[:stored]


def _add_tensors(amounts: list[float], size: float, copies: float) -> None:
    """Adds the cost of a number of tensors of ``size`` bytes to their class."""
    block = block_bytes(size)
    block_class = class_of_block(block)
    amounts[block_class] += copies * segment_cost(block, block_class)


def _walk_layers(job: JobNumbers, batch: Layer, layers: list[Layer], memory: StepMemory) -> None:
    """Adds every moment of the training step but the optimizer's step to ``memory``.

    Args:
        job: its numbers.
        batch: a record for the input batch, which is written here.
        layers: the layers with storage of their own, described.
        memory: cleared; what is found is noted here.
    """
    if len(layers):
        _add_tensors(memory.resident, job.input_bytes, job.batches_on_gpu)
    note_structure(layers)
    _note_trained_layers(job, layers)
    note_element_types(job, layers)
    batch.describe(_KINDS[0], 0.0, 0.0, 0, 0)
    batch.element_bytes = job.input_bytes / job.input_elements
    batch.elements = job.input_elements
    batch.output_bytes = job.input_bytes
    for layer in layers:
        note_tensor_sizes(job, layer)
    tied = _tied_embedding(layers)
    if tied is not None:
        _hold_tied_gradient(job, memory, tied, 1.0)
    _hold_named_output(job, memory, layers)
    source = projected = block_input = (
        batch  # the input of the layer, and that of the last projection that has no sibling before it
    )
    for at in range(len(layers)):
        if at % _LAYERS_AT_ONCE == _LAYERS_AT_ONCE - 1:
            sleep(0)
        layer = layers[at]
        following = layers[at + 1] if at + 1 < len(layers) else None
        if layer.begins_block:
            block_input = source
            if layer.is_recomputed:
                memory.recomputed = _NO_CLASS[:]
        layer.is_output_kept = _keeps_output(layer, following)
        if layer.kind.is_linear and not layer.is_sibling:
            projected = source
        _keep_tensors(memory, layers, at, source, projected, following)
        _hold_weights(job, memory, layer)
        if tied is not None and following is None and job.copy_bytes:
            _add_tensors(memory.weight_copies, tied.parameters * job.copy_bytes, 1.0)
        _end_block(memory, layer, following)
        _add_operator(job, memory, layer, source, block_input, at == 0)
        if layer.is_trained:
            _create_gradients(job, memory, layer)
        if layer.kind.is_softmax:
            _add_softmax(job, memory, layer, source)
        if layer.kind.is_convolution:
            memory.largest_convolution_bytes = max(
                memory.largest_convolution_bytes, layer.output_bytes + source.output_bytes
            )
        memory.largest_output_bytes = max(memory.largest_output_bytes, layer.output_bytes)
        source = layer
    if tied is not None:
        _hold_tied_gradient(job, memory, tied, -1.0)
    _add_loss(job, memory, layers, source)


def _note_trained_layers(job: JobNumbers, layers: list[Layer]) -> None:
    """Notes which layers are trained, and which the backward pass runs through: all from the first
    trained one on.

    Of the layers that do not say whether they train, the first ones are frozen.  A frozen layer
    behind a trained one hands the gradient on, for which a linear layer, a convolution and a scale
    need their weight alone (``tools/autograd/derivatives.yaml``).
    """
    frozen = job.frozen_parameters
    for layer in layers:
        if layer.trains == 0:
            frozen -= layer.parameters
    frozen = max(frozen, 0.0)
    parameters = 0.0
    has_backward = False
    for layer in layers:
        if layer.trains < 0:
            parameters += layer.parameters
            layer.is_trained = parameters > frozen
        else:
            layer.is_trained = layer.trains > 0
        has_backward = has_backward or layer.is_trained
        layer.has_backward = has_backward
        kind = layer.kind
        layer.saves_input = has_backward and (
            kind.saves_input or (kind.is_other and layer.parameters > 0.0)
        )
        if layer.trains == 0 and (
            kind.is_linear or kind.is_convolution or (kind.is_multiply and layer.parameters > 0.0)
        ):
            layer.saves_input = False
        layer.is_recomputed = job.is_checkpointed and layer.is_in_block


def _tied_embedding(layers: list[Layer]) -> Layer | None:
    """The embedding whose weights the last layer shares; none if that has its own."""
    tied = None
    if len(layers):
        last = layers[len(layers) - 1]
        if last.kind.is_linear and not last.parameters:
            largest = 0.0
            for layer in layers:
                if layer.kind.is_embedding and layer.parameters > largest:
                    tied = layer
                    largest = layer.parameters
    return tied


def _hold_tied_gradient(job: JobNumbers, memory: StepMemory, tied: Layer, copies: float) -> None:
    """A tied weight has its gradient from the start of the backward pass on, and another for a
    moment at the end of it."""
    if tied.is_trained:
        _add_tensors(
            memory.standing, tied.parameters * job.weight_bytes, copies * job.new_gradients
        )


def _hold_named_output(job: JobNumbers, memory: StepMemory, layers: list[Layer]) -> None:
    """The training loop has a name for the output of the network, which so lives until the step
    ends, unless the loop hands on the loss alone."""
    if len(layers) and not job.frees_outputs_first:
        last = layers[len(layers) - 1]
        memory.named_output[last.output_class] = last.output_cost
        if not last.has_backward or not last.kind.saves_output:  # else it is kept anyway
            memory.standing[last.output_class] += last.output_cost


def _keeps_output(layer: Layer, following: Layer | None) -> bool:
    """Whether autograd saves the output: the layer's own formula needs it, or the next layer's
    formula its input, uncast.

    Source: ``tools/autograd/derivatives.yaml`` (:mod:`gpumemnet.physics.saved_tensors`).
    """
    if layer.has_backward and (layer.kind.saves_output or layer.is_read_later):
        return True
    if following is None or not following.has_backward or layer.is_passed_on:
        return False
    # A sibling reads another input; this output goes to what reads them all.
    is_saved = following.saves_input or (following.is_sibling and following.kind.saves_input)
    return is_saved and following.input_element_bytes == layer.element_bytes


def _keep_output(memory: StepMemory, layer: Layer, block_class: int, cost: float) -> None:
    """The layer keeps a tensor for its backward pass; a checkpointed block keeps it while it is
    recomputed."""
    memory.kept[block_class] += cost
    memory.kept_by_group[layer.kind.group] += cost
    if layer.is_recomputed:
        memory.recomputed[block_class] += cost
    else:
        memory.standing[block_class] += cost


def _keep_bytes(memory: StepMemory, layer: Layer, size: float) -> None:
    """The layer keeps a tensor of ``size`` bytes for its backward pass."""
    block = block_bytes(size)
    block_class = class_of_block(block)
    _keep_output(memory, layer, block_class, segment_cost(block, block_class))


def _keep_tensors(
    memory: StepMemory,
    layers: list[Layer],
    at: int,
    source: Layer,
    projected: Layer,
    following: Layer | None,
) -> None:
    """All that autograd saves for the layer at ``at``: its output, cast inputs, a mask or indices,
    statistics of a norm.

    Args:
        memory: what is kept is added here.
        layers: all layers.
        at: position of the layer.
        source: its input.
        projected: the input of the projections that it is a sibling of.
        following: the layer behind it, if there is one.
    """
    layer = layers[at]
    kind = layer.kind
    # The output of a block is the input that the next block keeps; recomputing stops before it.
    is_block_input = (
        layer.is_recomputed
        and layer.block > 0
        and not kind.saves_output
        and (following is None or following.block != layer.block)
    )
    if layer.is_output_kept and not is_block_input:
        _keep_output(memory, layer, layer.output_class, layer.output_cost)
    if not layer.has_backward:
        return
    if (
        layer.saves_input
        and layer.input_element_bytes != source.element_bytes
        and not layer.is_constant_product
    ):
        _keep_bytes(memory, layer, source.elements * layer.input_element_bytes)
    if (
        layer.is_sibling
        and layer.saves_input
        and layer.input_element_bytes != projected.element_bytes
    ):
        _keep_bytes(memory, layer, projected.elements * layer.input_element_bytes)
    if kind.mask_bytes:
        _keep_bytes(memory, layer, layer.elements * kind.mask_bytes)
    if (
        kind.is_multiply
        and not layer.is_constant_product
        and _keeps_weighed_factor(layers, at, source)
    ):
        _keep_output(memory, layer, layer.output_class, layer.output_cost)
    if kind.statistics and layer.second_elements:
        _keep_output(memory, layer, layer.second_class, kind.statistics * layer.second_cost)


def _keeps_weighed_factor(layers: list[Layer], at: int, source: Layer) -> bool:
    """Whether the product at ``at`` keeps a factor that nothing else keeps: what it weighs.

    In squeeze-and-excitation (arXiv 1709.01507) the weights are the layer before, and smaller than
    the result.  What they weigh is as large as the result, and a few layers earlier.  In a SiLU or
    an approximate GELU that is written out, a gate weighs what it is computed from.
    """
    layer = layers[at]
    before = at - 1
    if layer.elements <= source.elements:
        if layer.parameters or not source.kind.is_gate:
            return False
        before -= 1
    nearest = max(at - _REACH, -1)
    while before > nearest:
        factor = layers[before]
        if factor.activations == layer.activations and not factor.kind.is_other:
            return not factor.is_output_kept
        before -= 1
    return layer.elements > source.elements


def _hold_weights(job: JobNumbers, memory: StepMemory, layer: Layer) -> None:
    """The parameters, and the copy of the weight in half precision that autocast caches until the
    region ends."""
    if layer.parameters:
        memory.weights[layer.weight_class] += layer.weight_cost
        memory.weights[layer.second_class] += layer.second_cost
        memory.largest_parameters = max(memory.largest_parameters, layer.parameters)
        # Autocast caches copies of trained weights; the backward pass keeps those of others.
        if layer.kind.is_cast and job.copy_bytes and (layer.has_backward or layer.trains < 0):
            _add_tensors(
                memory.weight_copies,
                (layer.parameters - layer.second_elements) * job.copy_bytes,
                1.0,
            )


def _end_block(memory: StepMemory, layer: Layer, following: Layer | None) -> None:
    """Activation checkpointing keeps the input of every block, so the output of the block before
    (``torch/utils/checkpoint.py``).

    The output of the last block is kept by its name in the training loop.
    """
    if not layer.is_recomputed:
        return
    if following is None:
        memory.block_count += 1.0
    elif following.begins_block or not following.is_in_block:
        memory.block_count += 1.0
        if layer.has_backward:
            memory.standing[layer.output_class] += layer.output_cost


def _add_operator(
    job: JobNumbers,
    memory: StepMemory,
    layer: Layer,
    source: Layer,
    block_input: Layer,
    is_first: bool,
) -> None:
    """The moment of a layer's backward pass, with the gradients of its output and of its input.

    A layer that has no backward pass has a moment in the forward pass, with its output and its
    input.  Where it is stated to be frozen, what else the code around it still holds is there too.
    """
    memory.moment = _NO_CLASS[:]
    memory.moment[layer.output_class] += layer.output_cost
    memory.moment[source.output_class] += source.output_cost
    if layer.kind.is_convolution and not layer.is_depthwise:
        _add_tensors(memory.moment, _layout_copies(job, layer, source, is_first), 1.0)
    if layer.has_backward:
        memory.moment[layer.output_class] += _extra_gradients(layer) * layer.output_cost
        if (
            layer.is_trained and not job.new_gradients
        ):  # the new gradients are added to those that exist, and freed
            memory.moment[layer.weight_class] += layer.weight_cost
            memory.moment[layer.second_class] += layer.second_cost
        _add_backward(job, memory, layer)
    else:
        if layer.input_element_bytes != source.element_bytes:
            _add_tensors(memory.moment, source.elements * layer.input_element_bytes, 1.0)
        if layer.kind.mask_bytes:
            _add_tensors(memory.moment, layer.elements * layer.kind.mask_bytes, 1.0)
        if layer.trains == 0:
            _hold_other_inputs(memory, layer, source, block_input)
        total = 0.0
        for c in range(_CLASSES):
            total += memory.moment[c]
        memory.forward_total = max(memory.forward_total, total)
        add_frozen_moment(memory)


def _hold_other_inputs(memory: StepMemory, layer: Layer, source: Layer, block_input: Layer) -> None:
    """Adds the inputs of a frozen layer beside ``source``, and that of its block, which the loop
    over the blocks has a name for.

    Attention reads keys and values beside queries, unless one projection makes all three, and a
    product of activations reads two.
    """
    if layer.block > 0 and block_input is not source:
        memory.moment[block_input.output_class] += block_input.output_cost
    if layer.kind.is_attention and source.activations <= layer.activations:
        memory.moment[source.output_class] += 2.0 * source.output_cost
    if layer.kind.is_multiply and not layer.parameters and not layer.is_constant_product:
        memory.moment[layer.output_class] += layer.output_cost


def _add_backward(job: JobNumbers, memory: StepMemory, layer: Layer) -> None:
    """Adds what is kept for the layers up to this one to the moment of its backward pass.

    The gradients of later layers are there as well, unless all are there from the start.  The sum
    over all layers is not known yet, so the moment is noted less the gradients of all layers: later
    the sum is added once.
    """
    total = 0.0
    for c in range(_CLASSES):
        moment = (
            memory.moment[c]
            + memory.standing[c]
            + memory.weight_copies[c]
            - job.new_gradients * memory.trained[c]
        )
        if layer.is_recomputed:
            moment += memory.recomputed[c]
        memory.backward_peak[c] = max(memory.backward_peak[c], moment)
        total += moment
    memory.backward_total = max(memory.backward_total, total)


def _extra_gradients(layer: Layer) -> float:
    """Tensors of the output's size in a backward pass, beside the gradients of output and input.

    A product has a gradient for each factor.  The softmax kernel first multiplies output and
    gradient (``cuda/SoftMax.cu``). Attention has three gradients, and their sums in fp32
    (``flash_attn/flash_api.cpp``, ``dq_accum``).
    """
    if layer.kind.is_attention:
        return 2.0 + (_FULL / layer.element_bytes if layer.element_bytes < _FULL else 0.0)
    if layer.kind.is_softmax or (layer.kind.is_multiply and not layer.is_constant_product):
        return 1.0
    return 0.0


def _layout_copies(job: JobNumbers, layer: Layer, source: Layer, is_first: bool) -> float:
    """Bytes of the copies that a tensor-core convolution makes of operands in another layout than
    its kernel reads.

    Those that the trace expects on an A100, by the rules of
    :mod:`gpumemnet.physics.element_types`, as far as a layer list shows them.  Channels last needs
    no copies, except of a first layer's image.  Half types add the weight's gradient up in fp32.
    No layer list shows other algorithms (FFT, Winograd), or GPUs without tensor cores.
    """
    is_half = layer.input_element_bytes < _FULL
    if is_first and not is_half and not _TF32_READS_IMAGES:
        return 0.0
    copied = 0.0
    if is_first:
        copied = _PADDED_IMAGE * source.elements
    elif not job.is_channels_last:
        copied = source.elements
    if not job.is_channels_last:
        copied += layer.elements + layer.parameters
    return copied * layer.input_element_bytes + (_FULL * layer.parameters if is_half else 0.0)


def _create_gradients(job: JobNumbers, memory: StepMemory, layer: Layer) -> None:
    """After its backward pass a layer has gradients, and all that the optimizer keeps and needs for
    its parameters."""
    memory.trained[layer.weight_class] += layer.weight_cost
    memory.trained[layer.second_class] += layer.second_cost
    if layer.kind.is_convolution:
        memory.filter_state[layer.weight_class] += job.filter_copies * layer.weight_cost
    if layer.parameters and job.loop_copies:
        # One temporary belongs to the parameter before (OptimizerRule.loop_copies).
        cost = (job.loop_copies - 1.0) * layer.weight_cost + memory.last_parameter_cost
        if cost > memory.loop_cost:
            memory.loop_cost = cost
            memory.loop_class = layer.weight_class
        memory.last_parameter_cost = (
            layer.second_cost if layer.second_elements else layer.weight_cost
        )


def _add_softmax(job: JobNumbers, memory: StepMemory, layer: Layer, source: Layer) -> None:
    """The forward pass of a softmax: scores, weights, and the math kernel's mask.

    Elsewhere the backward pass holds more.  Here it does not if it only runs for later layers, or
    for no other block.  The mask marks rows that are masked as a whole (``_safe_softmax`` in
    ``aten/src/ATen/native/transformers/attention.cpp``).
    """
    memory.attention_matrix_bytes += layer.output_bytes
    memory.moment = _NO_CLASS[:]
    memory.moment[source.output_class] += source.output_cost
    if not layer.is_output_kept:
        memory.moment[layer.output_class] += layer.output_cost
    if job.is_math_attention:
        _add_tensors(memory.moment, layer.elements, 1.0)
    total = 0.0
    for c in range(_CLASSES):
        moment = memory.moment[c] + memory.standing[c] + memory.weight_copies[c]
        if layer.is_recomputed:
            moment += memory.recomputed[c]
        memory.forward_peak[c] = max(memory.forward_peak[c], moment)
        total += moment
    memory.forward_total = max(memory.forward_total, total)


def _add_loss(job: JobNumbers, memory: StepMemory, layers: list[Layer], last: Layer) -> None:
    """The loss: all that the forward pass keeps, and the tensors of a cross-entropy of the logits.

    Autocast keeps log-probabilities in half precision, a copy in fp32, and its gradient.
    """
    trained = loss = 0.0
    if job.keeps_outputs:
        _add_previous_output(memory)
    if len(layers):
        memory.logits_bytes = last.elements * (_FULL if job.is_autocast else last.element_bytes)
        if job.is_autocast and last.element_bytes < _FULL:
            _add_tensors(memory.standing, memory.logits_bytes, _LOSS - 1.0)
            memory.standing[last.output_class] += last.output_cost
        else:
            _add_tensors(memory.standing, memory.logits_bytes, _LOSS)
    for c in range(_CLASSES):
        trained += memory.trained[c]
        memory.standing[c] += memory.weight_copies[c]
        loss += memory.standing[c]
        memory.backward_peak[c] += job.new_gradients * memory.trained[c]
        memory.backward_peak[c] = max(
            memory.backward_peak[c], memory.forward_peak[c], memory.standing[c]
        )
    memory.loss_total = loss
    memory.backward_total = max(
        memory.backward_total + job.new_gradients * trained, memory.forward_total, loss
    )


def _add_previous_output(memory: StepMemory) -> None:
    """At the end of the forward pass, the output of the step before is still there."""
    total = 0.0
    for c in range(_CLASSES):
        moment = memory.standing[c] + memory.weight_copies[c] + memory.named_output[c]
        memory.forward_peak[c] = max(memory.forward_peak[c], moment)
        total += moment
    memory.forward_total = max(memory.forward_total, total)
