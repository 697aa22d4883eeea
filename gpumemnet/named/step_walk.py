"""The peak of a training step of a named model: one block is walked through, and counts as often as
it stands in the network.

The walk follows autograd.  In the forward pass each operator's output lives until its last reader
has run, or until the backward pass if a formula saves it (``tools/autograd/derivatives.yaml``).  In
the backward pass gradients flow from the loss to the first block.  Sizes are in bytes of the
allocator's blocks, and beside the sum the peak of each block class is kept
(:mod:`gpumemnet.physics.step_memory`), because blocks of one class take over each other's segments.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.named.blocks import EAGER
from gpumemnet.named.methods import Method
from gpumemnet.named.operators import (
    BLOCK_INPUT,
    EMBEDDINGS,
    HEAD,
    IN_PLACE,
    Network,
    Operator,
    Section,
)
from gpumemnet.physics.element_types import FULL_BYTES, HALF_BYTES
from gpumemnet.physics.replicas import communicator_bytes
from gpumemnet.physics.saved_tensors import KIND_RULES
from gpumemnet.physics.step_memory import (
    BLOCK_CLASSES,
    BLOCK_TOPS,
    block_bytes,
    class_of_block,
    segment_cost,
)

_PASSED_ON: Final = ("add", "identity")
"""Kinds whose backward pass hands their gradient on."""
_NORM_TEMPORARIES: Final = 3
"""Tensors in fp32 of an RMS norm's backward pass in single operations, at once."""
"""Year from which ``transformers`` (5.0) checkpoints without re-entering autograd."""
_BUCKET_ELEMENTS: Final = 2 * 2 * 10**8
"""Gradients that DeepSpeed's stage 2 reduces at once, in two buffers of the size that its examples
state (``reduce_bucket_size``)."""
_BIAS_SUM_BYTES: Final = 2**20
"""Partial sums of a bias's gradient, for each multiprocessor at most
(:mod:`gpumemnet.tracing.operators.reductions`)."""
_GATHERED_UNITS: Final = 2
"""Blocks whose weights FSDP holds at once: the one that runs and the one fetched ahead."""


Amounts = NDArray[np.float64]
"""Bytes that are held: their sum, then their cost in segments by block class."""


def tensors(size: float, count: float = 1.0) -> Amounts:
    """What ``count`` tensors of ``size`` bytes hold."""
    held = np.zeros(1 + BLOCK_CLASSES)
    if size > 0:
        block, place, cost = _block(size)
        held[0], held[place] = count * block, count * cost
    return held


@lru_cache(maxsize=2**16)
def _block(size: float) -> tuple[float, int, float]:
    """Bytes of the block of a tensor, the place of its class in :data:`Amounts`, and its cost."""
    block = block_bytes(size)
    block_class = class_of_block(block)
    return block, 1 + block_class, segment_cost(block, block_class)


class _Live:
    """What is alive while a block is walked through, and the most that was."""

    def __init__(self) -> None:
        self.now = [0.0] * (1 + BLOCK_CLASSES)
        self.peak = list(self.now)

    def take(self, size: float) -> float:
        """Allocates; returns the size."""
        if size > 0:
            now, peak = self.now, self.peak
            block, place, cost = _block(size)
            now[0] += block
            now[place] += cost
            peak[0] = max(peak[0], now[0])
            peak[place] = max(peak[place], now[place])
        return size

    def pass_through(self, sizes: list[float]) -> None:
        """Allocates these tensors together, and frees them."""
        for size in sizes:
            self.take(size)
        for size in sizes:
            self.free(size)

    def free(self, size: float) -> None:
        """Frees."""
        if size > 0:
            block, place, cost = _block(size)
            self.now[0] -= block
            self.now[place] -= cost


class _Buffer:
    """A tensor with the number of its holders."""

    __slots__ = ("holders", "size")

    def __init__(self, size: float) -> None:
        self.size, self.holders = size, 1


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

    def __init__(self) -> None:
        nothing = tensors(0)
        self.weights = self.adapters = self.gradients = nothing
        self.saved = self.forward = self.backward = nothing
        self.trained: tuple[tuple[float, float], ...] = ()
        self.plain: Amounts | None = None


class _BlockWalk:
    """Walks through one block, forward and backward."""

    def __init__(self, section: Section, method: Method, multiprocessors: int) -> None:
        self.section, self.method = section, method
        self.batch = method.batch_size
        self.is_inner = section.is_checkpointed
        self.found = BlockMemory()
        self.live = _Live()
        self.element_bytes = {BLOCK_INPUT: method.outer_bytes}
        self.elements = {BLOCK_INPUT: section.input_elements * self.batch}
        self.needs_gradient = {BLOCK_INPUT: bool(section.input_elements)}
        self.tensors: dict[int, _Buffer] = {}
        self.saved: list[list[_Buffer]] = []
        self.kept: list[int] = []
        self.own: list[float] = []
        self.temporary: list[float] = []
        self.records = True
        self.has_fused_logits = False
        self.bias_sum_bytes = multiprocessors * _BIAS_SUM_BYTES

    def walk(self) -> BlockMemory:
        """Returns what the block holds."""
        found, live = self.found, self.live
        self.note_parameters()
        unread = self._walk_forward()
        found.forward = np.array(live.peak)
        for at in unread:  # the next block holds them, as its input
            live.free(self.tensors[at].size)
            self.tensors[at].size = 0.0
        found.saved, live.peak = np.array(live.now), list(live.now)
        self._backward(unread)
        found.backward = np.array(live.peak)
        return found

    def _walk_forward(self) -> list[int]:
        """Runs all operators; returns those whose outputs no other reads: what the block gives."""
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
        return [at for at in range(len(operators)) if at not in last_reader]

    def walk_without_gradients(self) -> Amounts:
        """The most that the forward pass of a checkpointed block holds; it saves nothing."""
        self.needs_gradient[BLOCK_INPUT] = False
        self.records = False
        self._walk_forward()
        return np.array(self.live.peak)

    def _bytes(self, at: int) -> int:
        return self.elements[at] * self.element_bytes[at]

    def _drop(self, buffer: _Buffer) -> None:
        buffer.holders -= 1
        if not buffer.holders:
            self.live.free(buffer.size)

    def _is_fused_head(self, operator: Operator) -> bool:
        return operator.name == "lm_head" and self.method.kernels != "none"

    def _trains(self, operator: Operator) -> bool:
        return not self.method.has_adapters and operator.parameters > 0

    def note_parameters(self) -> None:
        """Notes the parameters of a block, and what of them is trained."""
        for operator in self.section.operators:
            self._note_parameters(operator)

    def _note_parameters(self, operator: Operator) -> None:
        method, found = self.method, self.found
        for size in method.weight_bytes(operator, self.is_inner):
            found.weights = found.weights + tensors(size)
        trained: tuple[tuple[float, float], ...] = ()
        if self._trains(operator):
            trained = ((operator.parameters, method.outer_bytes),)
        elif method.is_target(operator, self.is_inner):
            adapter = method.adapter_elements(operator)
            trained = tuple((elements, method.adapter_bytes) for elements in adapter)
            for elements, element_bytes in trained:
                found.adapters = found.adapters + tensors(elements * element_bytes)
        found.trained += trained
        for elements, element_bytes in trained:
            found.gradients = found.gradients + tensors(elements * element_bytes)

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
        overwritten = self.tensors.get(operator.inputs[0]) if operator.kind == IN_PLACE else None
        if overwritten is None:
            overwritten = _Buffer(live.take(self._bytes(at)))
        else:
            overwritten.holders += 1
        self.tensors[at] = overwritten
        self.kept, self.own, self.temporary = [], [], []
        if needs:
            self._note_saved(at, operator, widest, has_adapter)
        buffers = [_Buffer(live.take(size)) for size in self.own]
        live.pass_through(self.temporary)
        for source in self.kept:
            if source in self.tensors:
                self.tensors[source].holders += 1
                buffers.append(self.tensors[source])
        self.saved.append(buffers)

    def _output_bytes(self, operator: Operator, widest: int) -> int:
        method, kind = self.method, operator.kind
        if kind == "linear" and self._is_dequantised(operator):
            return widest  # ``bitsandbytes.nn.Linear4bit`` answers in its input's type
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

    def _note_saved(self, at: int, operator: Operator, widest: int, has_adapter: bool) -> None:
        """Notes which tensors an operator saves (``kept``), the sizes of what it saves beside them
        (``own``), and its temporaries."""
        method, kind = self.method, operator.kind
        elements, sources = self.elements[at], list(operator.inputs)
        if kind == "linear":
            self._note_linear(operator, widest, has_adapter)
        elif kind == "rms_norm":
            if method.kernels == "liger" or widest == FULL_BYTES:
                self.kept = sources
            if method.kernels == "liger":
                return
            if widest < FULL_BYTES:
                self.own.append(FULL_BYTES * elements)
            if self._trains(operator):
                self.own.append(widest * elements)
            self.temporary = [FULL_BYTES * elements] * 2
        elif kind == "layer_norm":
            if method.is_autocast and widest < FULL_BYTES:
                self.own.append(FULL_BYTES * elements)
            else:
                self.kept = sources
        elif kind == "rotary":
            self.temporary = [self._bytes(at)] * (0 if method.kernels == "liger" else 2)
        elif kind == "attention":
            self._note_attention(at, operator)
        elif kind == "multiply" and method.kernels == "liger":
            self.kept = sources[1:]  # the activation is computed again
        elif kind == "loss":
            self._note_loss(operator)
        elif kind == IN_PLACE:
            self.kept = [at]
        elif kind not in ("add", "concatenate", "other", "embedding"):
            rule = KIND_RULES[kind]
            self.own.append(rule.mask_bytes * elements)
            self.kept = (sources if rule.saves_input else []) + ([at] if rule.saves_output else [])
            if rule.is_cast and method.is_autocast and operator.parameters:
                self.own.append(method.compute_bytes * operator.parameters)
                if widest > method.compute_bytes and sources[0] in self.elements:
                    self.own.append(method.compute_bytes * self.elements[sources[0]])
                    self.kept = []

    def _is_dequantised(self, operator: Operator) -> bool:
        """Whether a linear layer is one of ``bitsandbytes``, which dequantises it while it runs."""
        quantised = self.method.quantises(operator, self.is_inner)
        return quantised and self.method.quantisation != "gptq"

    def _note_linear(self, operator: Operator, widest: int, has_adapter: bool) -> None:
        method, compute = self.method, self.method.compute_bytes
        inputs = operator.rows * self.batch * operator.width
        matrix = method.matrix_elements(operator) * operator.copies
        cast = compute * inputs if widest > compute else 0
        self.temporary = [cast]
        if self._trains(operator):
            self._keep_input(operator, cast)
        if self._is_dequantised(operator):
            self.temporary.append(compute * matrix)
            if method.keeps_quantised_inputs:
                self._keep_input(operator, cast)
        elif method.outer_bytes > compute and not method.quantises(operator, self.is_inner):
            self.own.append(compute * matrix)  # autocast's copy of the weight
        if has_adapter:
            self._note_adapter(operator, inputs, widest)
        if self._is_fused_head(operator):
            self.own.append(compute * inputs)

    def _keep_input(self, operator: Operator, cast: float) -> None:
        """Notes that the input is saved, or its copy in another type."""
        if cast:
            self.own.append(cast)
        else:
            self.kept += operator.inputs

    def _note_adapter(self, operator: Operator, inputs: int, widest: int) -> None:
        """What the two matrices of an adapter save.

        ``peft`` casts the input to the adapter's fp32, and autocast back, so that each adapter saves
        a copy of its own; without autocast all of the branch is in fp32.
        """
        method, own = self.method, self.own
        outputs = operator.elements * self.batch
        if operator.copies > 1:  # ``ParamWrapper`` adds the product to the weights of all experts
            matrices = method.matrix_elements(operator) * operator.copies
            own.append(method.base_bytes * matrices)
            self.temporary.append(method.compute_bytes * matrices)
            return
        element_bytes = method.compute_bytes if method.is_autocast else method.adapter_bytes
        own.append(element_bytes * operator.rows * self.batch * method.lora_rank)
        if operator.name == "qkv_proj" and method.copies_parts:  # index_copy saves what it copies
            own.append(element_bytes * outputs)
        if method.lora_dropout:
            own += [inputs, element_bytes * inputs]
        else:
            is_same = widest == element_bytes == method.adapter_bytes
            self._keep_input(operator, 0 if is_same else element_bytes * inputs)
        self.temporary += [element_bytes * outputs] * 2
        if method.method == "dora":
            own += [element_bytes * outputs, method.compute_bytes * outputs]
            self.temporary += [FULL_BYTES * method.matrix_elements(operator)] * 2

    def _scores(self, operator: Operator) -> int:
        """Elements of an attention's scores where it runs in single operations; 0 where not."""
        if self.method.attention != "math" and operator.name != EAGER:
            return 0
        positions = operator.elements // (operator.heads * operator.width)
        return operator.heads * positions * positions * self.batch

    def _note_attention(self, at: int, operator: Operator) -> None:
        method, compute = self.method, self.method.compute_bytes
        self.kept = [*operator.inputs, at]
        wide = [each for each in operator.inputs if self.element_bytes.get(each, 0) > compute]
        copies: list[float] = []
        if wide and method.is_autocast:  # the kernel saves autocast's copies
            self.kept = [each for each in self.kept if each not in wide]
            copies = [compute * self.elements[each] for each in wide]
        scores = self._scores(operator)
        if scores:
            raised = sum(self.elements[source] for source in operator.inputs) * FULL_BYTES
            self.own = [FULL_BYTES * scores, raised if compute < FULL_BYTES else 0]
            self.temporary = [FULL_BYTES * scores]
            return
        self.own = [FULL_BYTES * (operator.elements // operator.width) * self.batch, *copies]
        if method.attention == "memory_efficient":
            self.own += [
                self.elements[at] * compute
                for source in operator.inputs[1:]
                if self.elements[source] < self.elements[at]
            ]

    def _note_loss(self, operator: Operator) -> None:
        """Cross-entropy: copies of the logits, and the logarithms of their probabilities.

        ``transformers/loss/loss_utils.py`` copies the logits to fp32; older versions also copy them
        without the last position.  Otherwise autocast raises them.
        """
        method = self.method
        if method.kernels != "none":
            return
        logits = operator.elements * self.batch
        compute, is_raised = method.compute_bytes, self._raises_loss()
        own_type = FULL_BYTES if method.raises_logits else compute
        self.temporary = [FULL_BYTES * logits] * (is_raised and compute < FULL_BYTES)
        self.temporary += [own_type * logits] * method.shifts_logits
        self.own = [self._loss_bytes() * logits]

    def _raises_loss(self) -> bool:
        return self.method.raises_logits or self.method.is_autocast

    def _loss_bytes(self) -> int:
        """Bytes of an element of the logarithms of probabilities and of their gradients."""
        return FULL_BYTES if self._raises_loss() else self.method.compute_bytes

    # ---- backward

    def _backward(self, outputs: list[int]) -> None:
        live = self.live
        gradients = {
            at: _Buffer(live.take(self._bytes(at))) for at in outputs if self.needs_gradient[at]
        }
        for at in range(len(self.section.operators) - 1, -1, -1):
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
        live, temporary = self.live, self._backward_temporary(operator)
        if operator.kind == "loss":  # one of them becomes the gradient of the logits
            live.pass_through(temporary)
            temporary = []
        for size in temporary:
            live.take(size)
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
        for size in temporary:
            live.free(size)
        self._drop(gradient)

    def _backward_temporary(self, operator: Operator) -> list[float]:
        """Tensors that live while the backward pass of this operator runs."""
        method, kind = self.method, operator.kind
        elements = operator.elements * self.batch
        compute = method.compute_bytes
        if kind == "linear":
            matrix = method.matrix_elements(operator) * operator.copies
            inputs = operator.rows * self.batch * operator.width
            found: list[float] = []
            if self._is_dequantised(operator):
                found.append(compute * matrix)
            if max(self.element_bytes.get(each, 0) for each in operator.inputs) > compute:
                found.append(compute * inputs)  # before it is cast to the input's type
            if method.is_target(operator, self.is_inner):
                wide = compute if method.is_autocast else method.adapter_bytes
                found.append(max(wide * elements, wide * inputs))
            if self._is_fused_head(operator):
                found.append(self._fused_loss_bytes(operator))
            if self._trains(operator) and operator.parameters > matrix:
                found.append(min(2.0 * FULL_BYTES * elements, self.bias_sum_bytes))
            return found
        if kind == "rms_norm":
            is_liger = method.kernels == "liger"
            return [compute * elements] if is_liger else [FULL_BYTES * elements] * _NORM_TEMPORARIES
        if kind == "attention":
            return self._attention_temporary(operator, elements)
        if kind == "loss" and method.kernels == "none" and method.library != "litgpt":
            return [self._loss_bytes() * elements] * 2  # of the logarithms, and of the logits
        return []

    def _fused_loss_bytes(self, operator: Operator) -> float:
        """Logits of one chunk and their gradients (Liger: as many chunks as the vocabulary is wider
        than the hidden state)."""
        rows = operator.rows * self.batch
        vocabulary = operator.elements // operator.rows
        chunk = -(-rows // -(-vocabulary // operator.width))
        return chunk * vocabulary * (2 * FULL_BYTES + HALF_BYTES)

    def _attention_temporary(self, operator: Operator, elements: int) -> list[float]:
        scores = self._scores(operator)
        if scores:
            return [FULL_BYTES * scores] * 2
        grouped = any(self.elements.get(each, elements) < elements for each in operator.inputs)
        copies = [self.method.compute_bytes * elements] * (2 * grouped)
        return [FULL_BYTES * elements, *copies]


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


PARTS: Final = tuple(each.name for each in fields(StepPeak) if each.name != "moment")


def step_peak(
    network: Network, method: Method, workspace_bytes: float, multiprocessors: int
) -> StepPeak:
    """Finds the peak of a training step.

    Args:
        network: the model, at the sequence length of ``method``.
        method: how it is trained.
        workspace_bytes: of cuBLAS, for each of the two threads of a training process.
        multiprocessors: of the GPU.
    """
    return _Step(network, method, workspace_bytes, multiprocessors).peak()


@dataclass(frozen=True, slots=True)
class _Moment:
    """What is held at one moment beyond what stays, and the gradients and logits in it."""

    name: str
    held: Amounts
    gradients: Amounts
    logits: float = 0.0


def _segments(moments: list[_Moment]) -> float:
    """Bytes of segments that serve these moments, in their order and again.

    A tensor takes what is free in segments of its class, then in those of larger classes, which the
    allocator splits; the smallest class has a pool of its own.  Gradients stay where they are until
    the step ends, so that segments that they split serve no tensor of their own class again.
    """
    reserved = [0.0] * BLOCK_CLASSES
    for moment in moments * 2:
        if moment is moments[0]:
            split, moved = [0.0] * BLOCK_CLASSES, [0.0] * BLOCK_CLASSES
        spare = [0.0] * BLOCK_CLASSES
        held, gradients = moment.held.tolist(), moment.gradients.tolist()
        for at in range(BLOCK_CLASSES - 1, 0, -1):
            # Gradients fill one segment after another: what is split counts as whole segments.
            whole = -(-split[at] // BLOCK_TOPS[at - 1]) * BLOCK_TOPS[at - 1]
            missing = held[at + 1] - moved[at] - max(reserved[at] - whole, 0.0)
            spare[at] = max(-missing, 0.0)
            stays = gradients[at + 1] - moved[at]
            for larger in range(at + 1, BLOCK_CLASSES if missing > 0 else 0):
                taken = min(missing, spare[larger])
                spare[larger] -= taken
                missing -= taken
                kept = min(taken, max(stays, 0.0))
                stays -= kept
                split[larger] += kept
                moved[at] += kept
            reserved[at] += max(missing, 0.0)
        reserved[0] = max(reserved[0], held[1])
    return sum(reserved)


class _Step:
    """Adds the blocks of a network up."""

    def __init__(
        self, network: Network, method: Method, workspace_bytes: float, multiprocessors: int
    ) -> None:
        self.method = method
        self.blocks: list[tuple[Section, BlockMemory]] = []
        for section in network.sections:
            block = _BlockWalk(section, method, multiprocessors).walk()
            if method.checkpointing and section.is_checkpointed:
                block.plain = _BlockWalk(section, method, multiprocessors).walk_without_gradients()
            self.blocks.append((section, block))
        self.counted = self.blocks
        """All blocks, and what the head shares with the embedding once less."""
        if network.tied_parameters:
            shared = Section("tied", -1, is_checkpointed=False)
            shared.add("embedding", (), 0, parameters=network.tied_parameters)
            walk = _BlockWalk(shared, method, multiprocessors)
            walk.note_parameters()
            self.counted = [*self.blocks, (shared, walk.found)]
        self.tied = tensors(0)
        """The sum of a shared embedding's gradients, while those of its two readers are there."""
        if network.tied_parameters and not method.has_adapters:
            self.tied = tensors(network.tied_parameters * method.outer_bytes)
        self.shares = method.gpus if method.is_sharded else 1
        self.workspace_bytes = 2.0 * workspace_bytes
        is_raised = method.is_sharded and method.is_autocast and not method.has_adapters
        self.growth = FULL_BYTES / method.outer_bytes if is_raised else 1.0
        """FSDP keeps trained weights in fp32 (accelerate with mixed precision)."""
        is_zero2 = method.splits_states
        self.bucket_bytes = _BUCKET_ELEMENTS * method.compute_bytes * is_zero2
        self.keeps_gradients = method.gradient_accumulation > 1 and self.shares == 1
        is_held = method.is_reentrant and method.has_adapters
        self.holds_inputs = is_held and method.is_sharded and method.parallel == "fsdp1"
        """Whether blocks whose backward pass has run still hold their input and its gradient.

        FSDP1 waits for the gradients of a frozen block's inputs by a hook that keeps their
        accumulators (``register_multi_grad_hook``), and these the tensors, until the step's end.
        With re-entrant checkpointing such an input is a leaf of its own.
        """

    def peak(self) -> StepPeak:
        """The largest of all moments."""
        resident = self._resident()
        moments = self._moments()
        peak = max(moments, key=lambda moment: float(moment.held[0]))
        stays = sum(resident.values(), tensors(0))
        allocated = stays[0] + peak.held[0]
        stays = stays + tensors(self.workspace_bytes / 2, 2.0)
        reserved = sum(stays[1:]) + _segments(moments)
        reserved += self._misfit_bytes()
        sizes = {name: amounts[0] for name, amounts in resident.items()}
        sizes["gradients_bytes"] += peak.gradients[0]
        shared = communicator_bytes((self.method.gpus,)) + self.bucket_bytes
        sizes |= {
            "activations_bytes": peak.held[0] - peak.gradients[0] - peak.logits,
            "logits_bytes": peak.logits,
            "workspace_bytes": self.workspace_bytes + shared,
            "fragmentation_bytes": max(reserved - allocated - self.workspace_bytes, 0.0),
        }
        return StepPeak(**{name: round(size) for name, size in sizes.items()}, moment=peak.name)

    def _misfit_bytes(self) -> float:
        """A segment more where the loss copies the logits without their last position.

        The backward pass ends with a gradient of all positions; the segments that are free by then
        are one position too small.
        """
        method, last = self.method, self.blocks[-1][0].operators[-1]
        if not method.shifts_logits or method.kernels != "none":
            return 0.0
        if method.is_autocast and not method.raises_logits:  # it fits where the logits were
            return 0.0
        own_type = FULL_BYTES if method.raises_logits else method.compute_bytes
        return own_type * last.elements * method.batch_size

    def _resident(self) -> dict[str, Amounts]:
        """What stays from step to step."""
        method, shares, growth = self.method, self.shares, self.growth
        weights, adapters, gradients, state = (tensors(0) for _ in range(4))
        state_shares = method.gpus if method.splits_states else shares
        for section, block in self.counted:
            weights += block.weights * (section.count * growth / shares)
            adapters += block.adapters * (section.count / shares)
            gradients += block.gradients * (section.count * self.keeps_gradients)
            for elements, element_bytes in block.trained:
                is_copied = method.splits_states and element_bytes < FULL_BYTES
                width = FULL_BYTES if is_copied else element_bytes * growth
                state += tensors(
                    method.state_bytes(elements, width) + is_copied * width * elements,
                    section.count / state_shares,
                )
        return {
            "base_weights_bytes": weights,
            "adapters_bytes": adapters,
            "optimizer_bytes": state,
            "gradients_bytes": gradients,
        }

    def _kept(self, section: Section, block: BlockMemory) -> Amounts:
        """What a block of a section keeps from its forward pass on."""
        if block.plain is None:
            return block.saved
        return tensors(section.input_elements * self.method.batch_size * self.method.outer_bytes)

    def _moments(self) -> list[_Moment]:
        """The moments of a step, in their order."""
        forward: list[_Moment] = []
        backward: list[_Moment] = []
        before = tensors(0)
        if self.shares > 1:  # from one buffer of all
            outside = self._gathered(Section("", 1, is_checkpointed=False), BlockMemory())
            held = outside + tensors(outside[0])
            forward.append(_Moment("gathering of weights", held, before))
        later = self._new_gradients() + self.tied * self._gradient_copies
        for section, block in self.blocks:
            kept, last = self._kept(section, block), section.count - 1
            created = block.gradients * self._gradient_copies
            later = later - created * section.count
            gathered, recomputes = self._gathered(section, block), block.plain is not None
            running = block.forward if block.plain is None else block.plain
            logits = self._logits(section, block)
            held = before + kept * last + running + gathered
            forward.append(_Moment(f"forward pass of {section.name}", held, tensors(0), logits))
            peak = np.maximum(block.backward, block.forward) if recomputes else block.backward
            for number in sorted({0, last}):
                gradients = later + created * (last - number + 1.0)
                held = before + kept * (number + recomputes) + peak + gradients + gathered
                held = held + self._unreduced(section, block)
                if section.name == EMBEDDINGS:
                    held = held + self.tied
                if self.holds_inputs and recomputes:
                    held += kept * (2.0 * (last - number))
                name = f"backward pass of {section.name}"
                backward.append(_Moment(name, held, gradients, logits))
            before = before + kept * section.count
        return [*forward, *backward[::-1], self._optimizer_step()]

    def _logits(self, section: Section, block: BlockMemory) -> float:
        """The part of what the head holds that is logits and their loss."""
        if section.name != HEAD:
            return 0.0
        method = self.method
        hidden = 3.0 * section.input_elements * method.batch_size * method.compute_bytes
        return max(float(max(block.forward[0], block.backward[0])) - hidden, 0.0)

    @property
    def _gradient_copies(self) -> float:
        """Copies of a block's gradients that its backward pass creates on each GPU."""
        method = self.method
        if self.keeps_gradients:
            return 0.0
        if method.splits_states:
            return 1.0 / method.gpus
        if method.parallel == "ddp" and method.gpus > 1:
            return 2.0
        return self.growth / self.shares

    def _new_gradients(self, copies: float | None = None) -> Amounts:
        copies = self._gradient_copies if copies is None else copies
        sums = (block.gradients * (section.count * copies) for section, block in self.counted)
        return sum(sums, tensors(0))

    def _gathered(self, section: Section, block: BlockMemory) -> Amounts:
        """Weights that sharded training gathers while a block runs, in the type of the computation.

        What lies outside of the blocks is one group, which stays (``fully_shard`` of the model).
        """
        if self.shares == 1:
            return tensors(0)
        blocks = block.weights * (_GATHERED_UNITS * section.is_checkpointed)
        return (blocks + self._outside("weights")) * min(
            self.method.compute_bytes / self.method.outer_bytes, 1.0
        )

    def _unreduced(self, section: Section, block: BlockMemory) -> Amounts:
        """Gradients of whole weights in sharded training, and their copies for the reduction."""
        if self.shares == 1 or section.name == HEAD:
            return tensors(0)
        if section.is_checkpointed:
            return block.gradients * self.growth + self._outside("gradients")
        return tensors(self._outside("gradients")[0] * self.growth)

    def _outside(self, name: str) -> Amounts:
        """Weights or gradients outside of the blocks, shared ones once."""
        outer = (
            getattr(block, name) * section.count
            for section, block in self.counted
            if not section.is_checkpointed
        )
        return sum(outer, tensors(0))

    def _optimizer_step(self) -> _Moment:
        gradients = self._new_gradients()
        method = self.method
        copies = method.step_copies() * self.growth / self.shares
        if method.splits_states:  # the gradients in fp32, for the copies of the weights
            copies += FULL_BYTES / method.outer_bytes / method.gpus
        return _Moment("optimizer step", gradients + self._new_gradients(copies), gradients)
