"""The peak of a training step of a named model: one block is walked through, and counts as often as
it stands in the network.

The walk follows autograd.  In the forward pass each operator's output lives until its last reader
has run, or until the backward pass if a formula saves it (``tools/autograd/derivatives.yaml``).  In
the backward pass gradients flow from the loss to the first block.  Sizes are in bytes of the
allocator's blocks, and beside the sum the peak of each block class is kept
(:mod:`gpumemnet.physics.step_memory`), because blocks of one class take over each other's segments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from gpumemnet.named.encoders import EAGER
from gpumemnet.named.methods import Method
from gpumemnet.named.operators import BLOCK_INPUT, HEAD, Network, Operator, Section
from gpumemnet.physics.element_types import FULL_BYTES, HALF_BYTES
from gpumemnet.physics.replicas import communicator_bytes
from gpumemnet.physics.saved_tensors import KIND_RULES
from gpumemnet.physics.step_memory import (
    BLOCK_CLASSES,
    block_bytes,
    class_of_block,
    segment_cost,
)

_PASSED_ON: Final = ("add", "identity")
"""Kinds whose backward pass hands their gradient on."""
_NORM_TEMPORARIES: Final = 3
"""Tensors in fp32 of an RMS norm's backward pass in single operations, at once."""
_INPUT_DROPPED: Final = 2024
"""Year in which ``bitsandbytes`` stopped saving the input of a quantised layer, which it never
needed (``MatMul4Bit``)."""
_REENTRANT_UNTIL: Final = 2026
"""Year from which ``transformers`` (5.0) checkpoints without re-entering autograd."""
_GATHERED_UNITS: Final = 2
"""Blocks whose weights FSDP holds at once: the one that runs and the one fetched ahead."""


class Amounts:
    """Bytes that are held: their sum, and their cost in segments by block class."""

    __slots__ = ("costs", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.costs = [0.0] * BLOCK_CLASSES

    def add(self, size: float, count: float = 1.0) -> None:
        """Adds ``count`` tensors of ``size`` bytes."""
        if size <= 0:
            return
        block = block_bytes(size)
        block_class = class_of_block(block)
        self.total += count * block
        self.costs[block_class] += count * segment_cost(block, block_class)

    def add_all(self, other: Amounts, count: float = 1.0) -> None:
        """Adds ``count`` times what ``other`` holds."""
        self.total += count * other.total
        for at, cost in enumerate(other.costs):
            self.costs[at] += count * cost

    def rise_to(self, other: Amounts) -> None:
        """Becomes the larger of the two, class by class."""
        self.total = max(self.total, other.total)
        self.costs = [max(pair) for pair in zip(self.costs, other.costs, strict=True)]

    def copy(self) -> Amounts:
        """A copy of its own."""
        made = Amounts()
        made.add_all(self)
        return made


class _Live:
    """What is alive while a block is walked through, and the most that was."""

    def __init__(self) -> None:
        self.now, self.peak = Amounts(), Amounts()

    def take(self, size: float) -> float:
        """Allocates; returns the size."""
        if size > 0:
            self.now.add(size)
            self.peak.rise_to(self.now)
        return size

    def free(self, size: float) -> None:
        """Frees."""
        self.now.add(size, -1.0) if size > 0 else None


class _Buffer:
    """A tensor with the number of its holders."""

    __slots__ = ("holders", "size")

    def __init__(self, size: float) -> None:
        self.size, self.holders = size, 1


@dataclass
class BlockMemory:
    """What one block holds.

    Attributes:
        weights, adapters: its parameters.
        frozen_elements, trained: elements of its parameters; trained ones with their bytes.
        saved: kept from its forward pass to its backward pass.
        forward, backward: the most during these passes beyond what other blocks hold; what it saved
            is included in ``backward``.
        gradients: of its parameters.
        plain: the most during a forward pass without gradients, of a checkpointed block.
    """

    weights: Amounts = field(default_factory=Amounts)
    adapters: Amounts = field(default_factory=Amounts)
    trained: list[tuple[float, float]] = field(default_factory=list)
    saved: Amounts = field(default_factory=Amounts)
    forward: Amounts = field(default_factory=Amounts)
    backward: Amounts = field(default_factory=Amounts)
    gradients: Amounts = field(default_factory=Amounts)
    plain: Amounts | None = None


class _BlockWalk:
    """Walks through one block, forward and backward."""

    def __init__(self, section: Section, method: Method, stream_bytes: int) -> None:
        self.section, self.method = section, method
        self.batch = method.batch_size
        self.is_inner = section.is_checkpointed
        self.found = BlockMemory()
        self.live = _Live()
        self.element_bytes = {BLOCK_INPUT: stream_bytes}
        self.elements = {BLOCK_INPUT: section.input_elements * self.batch}
        self.needs_gradient = {BLOCK_INPUT: bool(section.input_elements)}
        self.tensors: dict[int, _Buffer] = {}
        self.saved: list[list[_Buffer]] = []
        self.records = True
        self.has_fused_logits = False

    def walk(self) -> BlockMemory:
        """Returns what the block holds."""
        found, live = self.found, self.live
        for operator in self.section.operators:
            self._note_parameters(operator)
        self._walk_forward()
        last = len(self.section.operators) - 1
        found.forward.add_all(live.peak)
        self._drop(self.tensors[last])
        found.saved.add_all(live.now)
        live.peak = live.now.copy()
        self._backward(last)
        found.backward.add_all(live.peak)
        return found

    def _walk_forward(self) -> None:
        live, operators = self.live, self.section.operators
        last_reader = {
            source: at for at, operator in enumerate(operators) for source in operator.inputs
        }
        if self.section.input_elements:
            self.tensors[BLOCK_INPUT] = _Buffer(live.take(self._bytes(BLOCK_INPUT)))
        for at, operator in enumerate(operators):
            self._forward(at, operator)
            for source in set(operator.inputs):
                if last_reader[source] == at:
                    self._drop(self.tensors[source]) if source in self.tensors else None

    def walk_without_gradients(self) -> Amounts:
        """The most that the forward pass of a checkpointed block holds; it saves nothing."""
        self.needs_gradient[BLOCK_INPUT] = False
        self.records = False
        self._walk_forward()
        return self.live.peak

    def _bytes(self, at: int) -> float:
        return float(self.elements[at] * self.element_bytes[at])

    def _drop(self, buffer: _Buffer) -> None:
        buffer.holders -= 1
        if not buffer.holders:
            self.live.free(buffer.size)

    def _is_fused_head(self, operator: Operator) -> bool:
        return operator.name == "lm_head" and self.method.kernels != "none"

    def _trains(self, operator: Operator) -> bool:
        return not self.method.has_adapters and operator.parameters > 0

    def _note_parameters(self, operator: Operator) -> None:
        method, found = self.method, self.found
        for size in method.weight_bytes(operator, self.is_inner):
            found.weights.add(size)
        if self._trains(operator):
            element_bytes = method.outer_bytes
            found.trained.append((operator.parameters, element_bytes))
            found.gradients.add(operator.parameters * element_bytes)
        if method.is_target(operator, self.is_inner):
            for elements in method.adapter_elements(operator):
                found.trained.append((elements, method.adapter_bytes))
                found.adapters.add(elements * method.adapter_bytes)
                found.gradients.add(elements * method.adapter_bytes)

    # ---- forward

    def _forward(self, at: int, operator: Operator) -> None:
        """Allocates the output, what is saved, and temporaries."""
        method, live = self.method, self.live
        sources = [source for source in operator.inputs if source in self.element_bytes]
        widest = max((self.element_bytes[source] for source in sources), default=FULL_BYTES)
        has_adapter = method.is_target(operator, self.is_inner)
        needs = self._trains(operator) or has_adapter
        needs = needs or any(self.needs_gradient[source] for source in sources)
        if operator.kind == "embedding":
            needs = self._trains(operator)
        needs = needs and self.records
        self.needs_gradient[at] = needs
        self.elements[at] = operator.elements * self.batch
        self.element_bytes[at] = self._output_bytes(operator, widest)
        self.has_fused_logits |= self._is_fused_head(operator)
        if operator.kind == "loss":
            self.elements[at] = 1
        elif operator.kind == "identity" or self.has_fused_logits:
            self.elements[at] = 0  # the weights of an image encoder; logits that are never made
        self.tensors[at] = _Buffer(live.take(self._bytes(at)))
        kept, own, temporary = self._rule(at, operator, widest, has_adapter)
        buffers = [_Buffer(live.take(size)) for size in own]
        live.take(temporary)
        live.free(temporary)
        for source in kept:
            if source in self.tensors:
                self.tensors[source].holders += 1
                buffers.append(self.tensors[source])
        self.saved.append(buffers)

    def _output_bytes(self, operator: Operator, widest: int) -> int:
        method, kind = self.method, operator.kind
        if kind in ("linear", "attention"):
            return method.compute_bytes
        if kind == "embedding":
            return method.outer_bytes
        if kind == "rms_norm":
            return max(method.outer_bytes, widest)
        if kind == "layer_norm":
            return FULL_BYTES if method.is_autocast else widest
        if kind == "loss":
            return FULL_BYTES
        if method.is_autocast and kind in KIND_RULES:
            return KIND_RULES[kind].autocast_output_bytes or widest
        return widest

    def _rule(
        self, at: int, operator: Operator, widest: int, has_adapter: bool
    ) -> tuple[list[int], list[float], float]:
        """Which tensors an operator saves, sizes of what it saves beside them, and temporaries."""
        method, kind = self.method, operator.kind
        elements, sources = self.elements[at], list(operator.inputs)
        if not self.needs_gradient[at]:
            return [], [], 0.0
        if kind == "linear":
            return self._linear(operator, widest, has_adapter)
        if kind == "rms_norm":
            if method.kernels == "liger":
                return sources, [], 0.0
            own = [float(FULL_BYTES * elements)] if widest < FULL_BYTES else []
            if self._trains(operator):
                own.append(float(widest * elements))
            return sources if widest == FULL_BYTES else [], own, 2.0 * FULL_BYTES * elements
        if kind == "layer_norm":
            if method.is_autocast and widest < FULL_BYTES:
                return [], [float(FULL_BYTES * elements)], 0.0
            return sources, [], 0.0
        if kind == "rotary":
            return [], [], 0.0 if method.kernels == "liger" else 2.0 * self._bytes(at)
        if kind == "attention":
            return self._attention(at, operator)
        if kind == "multiply" and method.kernels == "liger":
            return sources[1:], [], 0.0  # the activation is computed again
        if kind == "loss":
            return self._loss(operator)
        if kind in ("add", "concatenate", "other", "embedding"):
            return [], [], 0.0
        rule = KIND_RULES[kind]
        own = [float(rule.mask_bytes * elements)] if rule.mask_bytes else []
        kept = (sources if rule.saves_input else []) + ([at] if rule.saves_output else [])
        if rule.is_cast and method.is_autocast and operator.parameters:
            own.append(float(method.compute_bytes * operator.parameters))
            if widest > method.compute_bytes and sources[0] in self.elements:
                own.append(float(method.compute_bytes * self.elements[sources[0]]))
                kept = []
        return kept, own, 0.0

    def _linear(
        self, operator: Operator, widest: int, has_adapter: bool
    ) -> tuple[list[int], list[float], float]:
        method, rows = self.method, operator.rows * self.batch
        compute = method.compute_bytes
        inputs, matrix = rows * operator.width, method.matrix_elements(operator) * operator.copies
        kept: list[int] = []
        own: list[float] = []
        cast = float(compute * inputs) if widest > compute else 0.0
        temporary = cast
        if self._trains(operator):
            if cast:
                own.append(cast)
            else:
                kept += operator.inputs
        is_quantised = method.is_quantised and self.is_inner
        weight_bytes = method.base_bytes if self.is_inner else method.outer_bytes
        if is_quantised and method.quantisation != "gptq":
            temporary += float(compute * matrix)
            if method.year < _INPUT_DROPPED:
                if cast:
                    own.append(cast)
                else:
                    kept += operator.inputs
        elif weight_bytes > compute and not is_quantised:
            own.append(float(compute * matrix))  # autocast's copy of the weight
        if has_adapter:
            more, sizes, extra = self._adapter(operator, inputs, widest)
            kept, own, temporary = kept + more, own + sizes, temporary + extra
        if self._is_fused_head(operator):
            own.append(float(compute * inputs))
        return kept, own, temporary

    def _adapter(
        self, operator: Operator, inputs: int, widest: int
    ) -> tuple[list[int], list[float], float]:
        """What the two matrices of an adapter save.

        Without autocast ``peft`` casts the input to the adapter's fp32, so that all of the branch
        is in fp32.
        """
        method = self.method
        element_bytes = method.compute_bytes if method.is_autocast else method.adapter_bytes
        kept: list[int] = []
        own = [float(element_bytes * operator.rows * self.batch * method.lora_rank)]
        if operator.name == "qkv_proj" and method.copies_parts:  # index_copy saves what it copies
            own.append(float(element_bytes * operator.elements * self.batch))
        if method.lora_dropout:
            own += [float(inputs), float(element_bytes * inputs)]
        elif widest == element_bytes:
            kept += operator.inputs
        else:
            own.append(float(element_bytes * inputs))
        outputs = operator.elements * self.batch
        temporary = 2.0 * element_bytes * outputs
        if method.method == "dora":
            own += [float(element_bytes * outputs), float(method.compute_bytes * outputs)]
            temporary += FULL_BYTES * 2.0 * method.matrix_elements(operator)
        return kept, own, temporary

    def _attention(self, at: int, operator: Operator) -> tuple[list[int], list[float], float]:
        method = self.method
        kept = [*operator.inputs, at]
        positions = operator.elements // (operator.heads * operator.width)
        scores = float(operator.heads * positions * positions * self.batch)
        if method.attention == "math" or operator.name == EAGER:
            raised = sum(self.elements[source] for source in operator.inputs)
            raised = raised * FULL_BYTES if method.compute_bytes < FULL_BYTES else 0
            return kept, [FULL_BYTES * scores, float(raised)], FULL_BYTES * scores
        own = [float(FULL_BYTES * operator.heads * positions * self.batch)]
        if method.attention == "memory_efficient":
            repeated = self.elements[at] * method.compute_bytes
            own += [
                float(repeated)
                for source in operator.inputs[1:]
                if self.elements[source] < self.elements[at]
            ]
        return kept, own, 0.0

    def _loss(self, operator: Operator) -> tuple[list[int], list[float], float]:
        """Cross-entropy: copies of the logits, and the logarithms of their probabilities.

        ``transformers/loss/loss_utils.py`` copies the logits to fp32; older versions also copy them
        without the last position.  Otherwise autocast raises them.
        """
        method = self.method
        if method.kernels != "none":
            return [], [], 0.0
        logits = float(operator.elements * self.batch)
        compute, is_raised = method.compute_bytes, self._raises_loss()
        own_type = FULL_BYTES if method.raises_logits else compute
        temporary = FULL_BYTES * logits if is_raised and compute < FULL_BYTES else 0.0
        temporary += own_type * logits * method.shifts_logits
        return [], [self._loss_bytes() * logits], temporary

    def _raises_loss(self) -> bool:
        return self.method.raises_logits or self.method.is_autocast

    def _loss_bytes(self) -> int:
        """Bytes of an element of the logarithms of probabilities and of their gradients."""
        return FULL_BYTES if self._raises_loss() else self.method.compute_bytes

    # ---- backward

    def _backward(self, last: int) -> None:
        live = self.live
        gradients: dict[int, _Buffer] = {last: _Buffer(live.take(self._bytes(last)))}
        for at in range(last, -1, -1):
            operator = self.section.operators[at]
            gradient = gradients.pop(at, None)
            if gradient is not None:
                self._propagate(operator, gradient, gradients)
            for buffer in self.saved[at]:
                self._drop(buffer)

    def _propagate(
        self, operator: Operator, gradient: _Buffer, gradients: dict[int, _Buffer]
    ) -> None:
        """One operator's backward pass."""
        live = self.live
        temporary = self._backward_temporary(operator)
        live.take(temporary)
        for source in sorted(set(operator.inputs)):
            if not self.needs_gradient.get(source):
                continue
            if operator.kind in _PASSED_ON:
                if source in gradients:  # the sum of two gradients
                    if gradients[source].holders > 1:
                        self._drop(gradients[source])
                        gradients[source] = _Buffer(live.take(self._bytes(source)))
                else:
                    gradient.holders += 1
                    gradients[source] = gradient
                continue
            size = live.take(self._bytes(source))
            if source in gradients and gradients[source].holders == 1:
                live.free(size)
            else:
                if source in gradients:
                    self._drop(gradients[source])
                gradients[source] = _Buffer(size)
        live.free(temporary)
        self._drop(gradient)

    def _backward_temporary(self, operator: Operator) -> float:
        method, kind = self.method, operator.kind
        elements = float(operator.elements * self.batch)
        compute = method.compute_bytes
        if kind == "linear":
            matrix = method.matrix_elements(operator) * operator.copies
            inputs = operator.rows * self.batch * operator.width
            found = 0.0
            if method.is_quantised and self.is_inner and method.quantisation != "gptq":
                found += compute * matrix
            if max(self.element_bytes.get(each, 0) for each in operator.inputs) > compute:
                found += compute * inputs  # before it is cast to the input's type
            if method.is_target(operator, self.is_inner):
                wide = compute if method.is_autocast else method.adapter_bytes
                found += max(wide * elements, wide * inputs)
            if self._is_fused_head(operator):
                found += self._fused_loss_bytes(operator)
            return found
        if kind == "rms_norm":
            return compute * elements if method.kernels == "liger" else self._norm_bytes(elements)
        if kind == "attention":
            return self._attention_temporary(operator, elements)
        if kind == "loss":
            if method.kernels != "none" or method.library == "litgpt":  # by chunks
                return 0.0
            return 2.0 * self._loss_bytes() * elements  # of the logarithms, and of the logits
        return 0.0

    @staticmethod
    def _norm_bytes(elements: float) -> float:
        return float(_NORM_TEMPORARIES * FULL_BYTES * elements)

    def _fused_loss_bytes(self, operator: Operator) -> float:
        """Logits of one chunk and their gradients (Liger: as many chunks as the vocabulary is wider
        than the hidden state)."""
        rows = operator.rows * self.batch
        vocabulary = operator.elements // operator.rows
        chunk = -(-rows // -(-vocabulary // operator.width))
        return float(chunk * vocabulary * (2 * FULL_BYTES + HALF_BYTES))

    def _attention_temporary(self, operator: Operator, elements: float) -> float:
        method = self.method
        positions = operator.elements // (operator.heads * operator.width)
        if method.attention == "math" or operator.name == EAGER:
            scores = float(operator.heads * positions * positions * self.batch)
            return 2.0 * FULL_BYTES * scores
        sums = FULL_BYTES * elements
        grouped = any(self.elements.get(each, elements) < elements for each in operator.inputs)
        return sums + (2.0 * method.compute_bytes * elements if grouped else 0.0)


@dataclass(frozen=True, slots=True)
class StepPeak:
    """The peak of a training step on one GPU, without the CUDA context.

    Attributes:
        base_weights_bytes, adapters_bytes, gradients_bytes, optimizer_bytes: at the peak.
        activations_bytes: what blocks keep and compute with.
        logits_bytes: logits, their loss, and the gradients of both.
        workspace_bytes: of cuBLAS, and NCCL's buffers.
        fragmentation_bytes: reserved by the allocator beyond what is in use.
        moment: when the peak is.
    """

    base_weights_bytes: int
    adapters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    logits_bytes: int
    workspace_bytes: int
    fragmentation_bytes: int
    moment: str

    @property
    def allocated_bytes(self) -> int:
        """In use at the peak: what ``torch.cuda.max_memory_allocated`` reads."""
        return self.reserved_bytes - self.fragmentation_bytes

    @property
    def reserved_bytes(self) -> int:
        """What the allocator reserves, and NCCL holds."""
        return sum(getattr(self, name) for name in PARTS)


PARTS: Final = (
    *("base_weights_bytes", "adapters_bytes", "gradients_bytes", "optimizer_bytes"),
    *("activations_bytes", "logits_bytes", "workspace_bytes", "fragmentation_bytes"),
)


def step_peak(network: Network, method: Method, workspace_bytes: float) -> StepPeak:
    """Finds the peak of a training step.

    Args:
        network: the model, at the sequence length of ``method``.
        method: how it is trained.
        workspace_bytes: of cuBLAS, for each of the two threads of a training process.
    """
    return _Step(network, method, workspace_bytes).peak()


@dataclass(frozen=True, slots=True)
class _Moment:
    """What is held at one moment beyond what stays, and the gradients and logits in it."""

    name: str
    held: Amounts
    gradients: float = 0.0
    logits: float = 0.0


def _segments(moments: list[Amounts]) -> float:
    """Bytes of segments that serve these moments, in their order and again.

    A tensor takes what is free in segments of its class, then in those of larger classes, which the
    allocator splits; the smallest class has a pool of its own.
    """
    reserved = [0.0] * BLOCK_CLASSES
    for held in moments * 2:
        spare = 0.0
        for at in range(BLOCK_CLASSES - 1, 0, -1):
            missing = held.costs[at] - reserved[at]
            if missing <= 0:
                spare -= missing
                continue
            taken = min(missing, spare)
            spare -= taken
            reserved[at] += missing - taken
        reserved[0] = max(reserved[0], held.costs[0])
    return sum(reserved)


class _Step:
    """Adds the blocks of a network up."""

    def __init__(self, network: Network, method: Method, workspace_bytes: float) -> None:
        self.method, self.sections = method, network.sections
        self.blocks: list[BlockMemory] = []
        stream = method.outer_bytes
        for section in network.sections:
            walk = _BlockWalk(section, method, stream)
            block = walk.walk()
            if method.checkpointing and section.is_checkpointed:
                walk = _BlockWalk(section, method, stream)
                block.plain = walk.walk_without_gradients()
            self.blocks.append(block)
        self.tied = network.tied_parameters
        self.shares = method.gpus if method.is_sharded else 1
        self.workspace_bytes = 2.0 * workspace_bytes
        self.is_raised = self.shares > 1 and method.is_autocast and not method.has_adapters
        """Whether FSDP keeps trained weights in fp32 (accelerate with mixed precision)."""
        is_reentrant = method.year < _REENTRANT_UNTIL and method.has_adapters
        self.holds_inputs = is_reentrant and method.is_sharded and method.parallel == "fsdp1"
        """Whether blocks whose backward pass has run still hold their input and its gradient.

        FSDP1 waits for the gradients of a frozen block's inputs by a hook that keeps their
        accumulators (``register_multi_grad_hook``), and these the tensors, until the step's end.
        With re-entrant checkpointing such an input is a leaf of its own.
        """

    def peak(self) -> StepPeak:
        """The largest of all moments."""
        resident, parts = self._resident()
        moments = self._moments()
        peak = max(moments, key=lambda moment: moment.held.total)
        moment, gradients, logits = peak.name, peak.gradients, peak.logits
        accumulated = parts["gradients_bytes"]
        allocated = resident.total + peak.held.total
        if self.workspace_bytes:
            resident.add(self.workspace_bytes / 2, 2.0)
        reserved = sum(resident.costs) + _segments([each.held for each in moments])
        reserved += self._misfit_bytes()
        fragmentation = max(reserved - allocated - self.workspace_bytes, 0.0)
        activations = peak.held.total - gradients - logits
        nccl = communicator_bytes((self.method.gpus,))
        return StepPeak(
            round(parts["base_weights_bytes"]),
            round(parts["adapters_bytes"]),
            round(accumulated + gradients),
            round(parts["optimizer_bytes"]),
            round(activations),
            round(logits),
            round(self.workspace_bytes + nccl),
            round(fragmentation),
            moment,
        )

    def _misfit_bytes(self) -> float:
        """A segment more where the loss copies the logits without their last position.

        The backward pass ends with a gradient of all positions; the segments that are free by then
        are one position too small.
        """
        method, last = self.method, self.sections[-1].operators[-1]
        if not (method.shifts_logits and method.raises_logits) or method.kernels != "none":
            return 0.0
        return float(FULL_BYTES * last.elements * method.batch_size)

    def _resident(self) -> tuple[Amounts, dict[str, float]]:
        """What stays from step to step."""
        method, shares = self.method, self.shares
        weights, adapters, state, gradients = Amounts(), Amounts(), Amounts(), Amounts()
        is_kept = method.gradient_accumulation > 1 and shares == 1
        growth = FULL_BYTES / method.outer_bytes if self.is_raised else 1.0
        for section, block in zip(self.sections, self.blocks, strict=True):
            weights.add_all(block.weights, section.count * growth / shares)
            adapters.add_all(block.adapters, section.count / shares)
            if is_kept:
                gradients.add_all(block.gradients, section.count)
            for elements, element_bytes in block.trained:
                size = method.state_bytes(elements, element_bytes * growth)
                zero = method.gpus if method.parallel == "zero2" else shares
                state.add(size, section.count / zero)
        if self.tied:
            weights.add(self.tied * method.outer_bytes * growth, -1.0 / shares)
            if not method.has_adapters:
                elements = float(self.tied)
                state.add(method.state_bytes(elements, method.outer_bytes * growth), -1.0 / shares)
                if is_kept:
                    gradients.add(elements * method.outer_bytes, -1.0)
        resident = Amounts()
        for each in (weights, adapters, state, gradients):
            resident.add_all(each)
        return resident, {
            "base_weights_bytes": weights.total,
            "adapters_bytes": adapters.total,
            "optimizer_bytes": state.total,
            "gradients_bytes": gradients.total,
        }

    def _kept(self, at: int) -> Amounts:
        """What a block of a section keeps from its forward pass on."""
        section, block = self.sections[at], self.blocks[at]
        if not (self.method.checkpointing and section.is_checkpointed):
            return block.saved
        kept = Amounts()
        kept.add(section.input_elements * self.method.batch_size * self.method.outer_bytes)
        return kept

    def _moments(self) -> list[_Moment]:
        """The moments of a step, in their order."""
        forward: list[_Moment] = []
        backward: list[_Moment] = []
        before = Amounts()
        later = self._new_gradients()
        for at, (section, block) in enumerate(zip(self.sections, self.blocks, strict=True)):
            kept, last = self._kept(at), section.count - 1
            created = self._gradients_of(block, 1.0)
            later.add_all(created, -float(section.count))
            held = before.copy()
            held.add_all(kept, last)
            held.add_all(block.plain or block.forward)
            held.add_all(self._gathered(block))
            logits = self._logits(section, max(block.forward.total, block.backward.total))
            forward.append(_Moment(f"forward pass of {section.name}", held, 0.0, logits))
            for number in sorted({0, last}):
                held = before.copy()
                held.add_all(kept, number + (block.plain is not None))
                if self.holds_inputs and block.plain is not None:
                    held.add_all(kept, 2.0 * (last - number))
                peak = block.backward.copy()
                if block.plain is not None:
                    peak.rise_to(block.forward)
                held.add_all(peak)
                held.add_all(later)
                held.add_all(created, last - number + 1.0)
                held.add_all(self._gathered(block))
                gradients = later.total + created.total * (last - number + 1.0)
                name = f"backward pass of {section.name}"
                backward.append(_Moment(name, held, gradients, logits))
            before.add_all(kept, section.count)
        return [*forward, *backward[::-1], self._optimizer_step()]

    def _logits(self, section: Section, held: float) -> float:
        """The part of what the head holds that is logits and their loss."""
        if section.name != HEAD:
            return 0.0
        return max(held - self._hidden_bytes(section), 0.0)

    def _hidden_bytes(self, section: Section) -> float:
        return 3.0 * section.input_elements * self.method.batch_size * self.method.compute_bytes

    def _gradients_of(self, block: BlockMemory, count: float) -> Amounts:
        """Gradients that the backward pass of a block creates."""
        created = Amounts()
        if self.method.gradient_accumulation > 1 and self.shares == 1:
            return created
        growth = FULL_BYTES / self.method.outer_bytes if self.is_raised else 1.0
        created.add_all(block.gradients, count * growth / self.shares)
        if self.method.parallel == "zero2":
            created = Amounts()
            created.add_all(block.gradients, count / self.method.gpus)
        if self.method.parallel == "ddp" and self.method.gpus > 1:
            created.add_all(block.gradients, count)
        return created

    def _new_gradients(self) -> Amounts:
        found = Amounts()
        for section, block in zip(self.sections, self.blocks, strict=True):
            found.add_all(self._gradients_of(block, float(section.count)))
        if self.tied and not self.method.has_adapters and self.method.gradient_accumulation == 1:
            found.add(self.tied * self.method.outer_bytes, -1.0 / self.shares)
        return found

    def _gathered(self, block: BlockMemory) -> Amounts:
        """Weights that sharded training gathers while a block runs, in the type of the computation,
        with the gradients before they are reduced."""
        found = Amounts()
        if self.shares == 1:
            return found
        found.add_all(block.weights, float(_GATHERED_UNITS))
        found.add_all(block.gradients)
        for section, outer in zip(self.sections, self.blocks, strict=True):
            if not section.is_checkpointed and outer is not block:
                found.add_all(outer.weights)
        return found

    def _optimizer_step(self) -> _Moment:
        held = self._new_gradients()
        gradients = held.total
        trained = Amounts()
        growth = FULL_BYTES / self.method.outer_bytes if self.is_raised else 1.0
        copies = self.method.step_copies() * growth / self.shares
        for section, block in zip(self.sections, self.blocks, strict=True):
            trained.add_all(block.gradients, section.count * copies)
        if self.tied and not self.method.has_adapters:
            trained.add(self.tied * self.method.outer_bytes, -copies)
        held.add_all(trained)
        return _Moment("optimizer step", held, gradients)
