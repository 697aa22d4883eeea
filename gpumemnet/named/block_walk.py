"""Walks through one block of a named model, forward and backward.

The walk follows autograd.  In the forward pass each operator's output lives until its last reader
has run, or until the backward pass if a formula saves it (``tools/autograd/derivatives.yaml``).  In
the backward pass gradients flow from the last operator to the block's input.  Sizes are in bytes of
the allocator's blocks, and beside the sum the peak of each block class is kept
(:mod:`gpumemnet.physics.step_memory`), because blocks of one class take over each other's segments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpumemnet.named.blocks import EAGER
from gpumemnet.named.methods import Method
from gpumemnet.named.operators import BLOCK_INPUT, IN_PLACE, OUTER_INPUT, Operator, Section
from gpumemnet.physics.element_types import FULL_BYTES, HALF_BYTES
from gpumemnet.physics.saved_tensors import KIND_RULES, KindRule
from gpumemnet.physics.step_memory import (
    BLOCK_CLASSES,
    block_bytes,
    class_of_block,
    segment_cost,
)

_NORM_TEMPORARIES: Final = 3
"""Tensors in fp32 of an RMS norm's backward pass in single operations, at once."""
_BIAS_SUM_BYTES: Final = 108 * 2**20
"""Most partial sums of a bias's gradient: 1 MiB for each multiprocessor, here of an A100
(:mod:`gpumemnet.tracing.operators.reductions`)."""

_OVERWRITTEN: Final = KindRule(saves_output=True)
"""Of an activation that overwrites its input (:data:`~gpumemnet.named.operators.IN_PLACE`)."""

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


@dataclass(slots=True)
class _Tensor:
    """A tensor with the number of its holders."""

    size: float
    holders: int = 1


class _Live:
    """What is alive while a block is walked through, and the most that was."""

    def __init__(self) -> None:
        self.now = [0.0] * (1 + BLOCK_CLASSES)
        self.peak = list(self.now)

    def take(self, size: float) -> _Tensor:
        """Allocates."""
        if size > 0:
            now, peak = self.now, self.peak
            block, place, cost = _block(size)
            now[0] += block
            now[place] += cost
            peak[0] = max(peak[0], now[0])
            peak[place] = max(peak[place], now[place])
        return _Tensor(size)

    def drop(self, *held: _Tensor) -> None:
        """Frees tensors that nothing else holds."""
        for each in held:
            each.holders -= 1
            if not each.holders and each.size > 0:
                block, place, cost = _block(each.size)
                self.now[0] -= block
                self.now[place] -= cost


@dataclass
class _Use:
    """What an operator holds beside its output.

    Attributes:
        kept: tensors that it saves, by their numbers.
        own: sizes of what it saves beside them.
        forward, backward: sizes of the temporaries of its passes.
    """

    kept: list[int] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)

    def keep(self, sources: tuple[int, ...], copied: float) -> None:
        """Saves these inputs, or their copy of ``copied`` bytes in another type, if there is one."""
        if copied:
            self.own.append(copied)
        else:
            self.kept += sources


class BlockMemory:
    """What one block holds.

    Attributes:
        section: its operators, and how often it stands in the network.
        weights, adapters, gradients: of its parameters.
        trained: elements of the trained ones, with their bytes.
        saved: kept from its forward pass to its backward pass.
        forward, backward: the most during these passes beyond what other blocks hold; what it saved
            is included in ``backward``.
        is_recomputed: whether the backward pass begins with another forward pass.
    """

    def __init__(self, section: Section) -> None:
        self.section, self.is_recomputed = section, False
        self.weights = self.adapters = self.gradients = tensors(0)
        self.saved = self.forward = self.backward = tensors(0)
        self.trained: list[tuple[float, float]] = []


def block_memory(section: Section, method: Method) -> BlockMemory:
    """What a block holds: the walk without gradients is the forward pass of one that is recomputed.

    Args:
        section: the block.
        method: how it is trained.
    """
    found = _BlockWalk(section, method, records=True).walk()
    if method.checkpointing and section.is_checkpointed:
        found.is_recomputed = True
        found.backward = np.maximum(found.backward, found.forward)
        first = _BlockWalk(section, method, records=False)
        first.walk_forward()
        found.forward = np.array(first.live.peak)
        found.saved = tensors(section.input_elements * method.batch_size * method.outer_bytes)
    return found


class _BlockWalk:
    def __init__(self, section: Section, method: Method, *, records: bool) -> None:
        self.section, self.method, self.records = section, method, records
        self.batch, self.is_inner = method.batch_size, section.is_checkpointed
        self.live = _Live()
        self.element_bytes = dict.fromkeys((BLOCK_INPUT, OUTER_INPUT), method.outer_bytes)
        self.elements = {BLOCK_INPUT: section.input_elements * self.batch}
        self.needs_gradient = {BLOCK_INPUT: records and section.input_elements > 0}
        self.tensors: dict[int, _Tensor] = {}
        self.done: list[tuple[list[float], list[_Tensor]]] = []
        """Of each operator that has run: temporaries of its backward pass, and what it saved."""
        self.has_fused_logits = False
        compute, outer = method.compute_bytes, method.outer_bytes
        self.output_bytes = {"linear": compute, "attention": compute, "embedding": outer}
        self.output_bytes["loss"] = FULL_BYTES
        self.special = {"linear": self._linear, "attention": self._attention, "loss": self._loss}

    def walk(self) -> BlockMemory:
        """Returns what the block holds."""
        found, live = BlockMemory(self.section), self.live
        for operator in self.section.operators:
            self._note_parameters(operator, found)
        unread = self.walk_forward()
        found.forward = np.array(live.peak)
        for at in unread:  # the next block holds them, as its input
            live.drop(_Tensor(self.tensors[at].size))
            self.tensors[at].size = 0.0
        found.saved, live.peak = np.array(live.now), list(live.now)
        self._walk_backward(unread)
        found.backward = np.array(live.peak)
        return found

    def _note_parameters(self, operator: Operator, found: BlockMemory) -> None:
        method = self.method
        for size in method.weight_bytes(operator, self.is_inner):
            found.weights = found.weights + tensors(size)
        trained: list[tuple[float, float]] = []
        if self._trains(operator):
            trained = [(operator.parameters, method.outer_bytes)]
        elif method.is_target(operator, self.is_inner):
            trained = [(size, method.adapter_bytes) for size in method.adapter_elements(operator)]
        for elements, element_bytes in trained:
            held = tensors(elements * element_bytes)
            found.gradients = found.gradients + held
            if method.has_adapters:
                found.adapters = found.adapters + held
        found.trained += trained

    def _trains(self, operator: Operator) -> bool:
        return not self.method.has_adapters and operator.parameters > 0

    def _bytes(self, at: int) -> int:
        return self.elements[at] * self.element_bytes[at]

    # ---- forward

    def walk_forward(self) -> list[int]:
        """Runs all operators; returns those whose outputs no other reads: what the block gives."""
        live, operators = self.live, self.section.operators
        last_reader = {
            source: at for at, operator in enumerate(operators) for source in operator.inputs
        }
        if self.section.input_elements:
            self.tensors[BLOCK_INPUT] = live.take(self._bytes(BLOCK_INPUT))
        for at, operator in enumerate(operators):
            self._forward(at, operator)
            for source in set(operator.inputs):
                if last_reader[source] == at and source in self.tensors:
                    live.drop(self.tensors[source])
        return [at for at in range(len(operators)) if at not in last_reader]

    def _forward(self, at: int, operator: Operator) -> None:
        """Allocates the output, what is saved, and temporaries."""
        kind, inputs, live = operator.kind, operator.inputs, self.live
        widest = max((self.element_bytes[each] for each in inputs), default=FULL_BYTES)
        trains = self._trains(operator) or self.method.is_target(operator, self.is_inner)
        reads = kind != "embedding" and any(self.needs_gradient.get(each) for each in inputs)
        self.needs_gradient[at] = self.records and (trains or reads)
        self.elements[at] = operator.elements * self.batch
        self.element_bytes[at] = self._output_bytes(operator, widest)
        self.has_fused_logits |= self._is_fused_head(operator)
        if kind == "loss":
            self.elements[at] = 1
        elif kind == "identity" or self.has_fused_logits:
            self.elements[at] = 0  # the weights of an image encoder; logits that are never made
        if kind == IN_PLACE and inputs[0] in self.tensors:
            self.tensors[at] = self.tensors[inputs[0]]
            self.tensors[at].holders += 1
        else:
            self.tensors[at] = live.take(self._bytes(at))
        if not self.needs_gradient[at]:
            self.done.append(([], []))
            return
        use = self._use(at, operator, widest)
        saved = [live.take(size) for size in use.own]
        live.drop(*[live.take(size) for size in use.forward])
        for source in use.kept:
            if source in self.tensors:
                self.tensors[source].holders += 1
                saved.append(self.tensors[source])
        self.done.append((use.backward, saved))

    def _output_bytes(self, operator: Operator, widest: int) -> int:
        method, kind = self.method, operator.kind
        if self._is_dequantised(operator):
            return widest  # ``bitsandbytes.nn.Linear4bit`` answers in its input's type
        if kind == "rms_norm":
            return max(method.outer_bytes, widest)
        cast = method.is_autocast and KIND_RULES.get(kind, _OVERWRITTEN).autocast_output_bytes
        return self.output_bytes.get(kind) or cast or widest

    def _use(self, at: int, operator: Operator, widest: int) -> _Use:
        method, elements = self.method, self.elements[at]
        if operator.kind in self.special:
            return self.special[operator.kind](at, operator, widest)
        is_liger, raised = method.kernels == "liger", float(FULL_BYTES * elements)
        use, sources = _Use(), operator.inputs
        if operator.kind == "rotary":
            return use
        if operator.kind == "rms_norm" and is_liger:
            return _Use([*sources], backward=[method.compute_bytes * elements])
        if operator.kind == "rms_norm":
            use.keep(sources, raised if widest < FULL_BYTES else 0)
            use.own += [widest * elements] * self._trains(operator)
            use.forward, use.backward = [raised] * 2, [raised] * _NORM_TEMPORARIES
            return use
        rule = KIND_RULES.get(operator.kind, _OVERWRITTEN)
        use.own = [rule.mask_bytes * elements]
        if rule.is_cast and method.is_autocast:
            use.own.append(method.compute_bytes * operator.parameters)
        if rule.saves_input:
            computed_again = operator.kind == "multiply" and is_liger  # the activation
            for source in sources[computed_again:]:
                own_bytes = self.element_bytes[source]
                read_bytes = (method.is_autocast and rule.autocast_input_bytes) or own_bytes
                copied = read_bytes * self.elements.get(source, 0)
                use.keep((source,), 0 if read_bytes == own_bytes else copied)
        if rule.saves_output:
            use.keep((at,), 0)
        return use

    # ---- linear layers

    def _is_dequantised(self, operator: Operator) -> bool:
        """Whether a linear layer is one of ``bitsandbytes``, which dequantises it while it runs."""
        quantised = self.method.quantises(operator, self.is_inner)
        return operator.kind == "linear" and quantised and self.method.quantisation != "gptq"

    def _is_fused_head(self, operator: Operator) -> bool:
        return operator.name == "lm_head" and self.method.kernels != "none"

    def _linear(self, at: int, operator: Operator, widest: int) -> _Use:
        method, compute = self.method, self.method.compute_bytes
        rows = operator.rows * self.batch
        matrix = method.matrix_elements(operator) * operator.copies
        cast = compute * rows * operator.width if widest > compute else 0
        use = _Use(forward=[cast], backward=[cast])
        if self._trains(operator):
            use.keep(operator.inputs, cast)
            if operator.parameters > matrix:  # a bias
                sums = 2.0 * FULL_BYTES * operator.elements * self.batch
                use.backward.append(min(sums, _BIAS_SUM_BYTES))
        if self._is_dequantised(operator):
            use.forward.append(compute * matrix)
            use.backward.append(compute * matrix)
            if method.keeps_quantised_inputs:
                use.keep(operator.inputs, cast)
        elif method.outer_bytes > compute and not method.quantises(operator, self.is_inner):
            use.own.append(compute * matrix)  # autocast's copy of the weight
        if method.is_target(operator, self.is_inner):
            self._adapt(use, operator, widest)
        if self._is_fused_head(operator):
            # Logits of one chunk and their gradients (Liger: as many chunks as the vocabulary is
            # wider than the hidden state).
            vocabulary = operator.elements // operator.rows
            chunk = -(-rows // -(-vocabulary // operator.width))
            use.own.append(compute * rows * operator.width)
            use.backward.append(chunk * vocabulary * (2 * FULL_BYTES + HALF_BYTES))
        return use

    def _adapt(self, use: _Use, operator: Operator, widest: int) -> None:
        """Adds what the two matrices of an adapter hold.

        ``peft`` casts the input to the adapter's fp32, and autocast back, so that each adapter saves
        a copy of its own; without autocast all of the branch is in fp32.
        """
        method, rows = self.method, operator.rows * self.batch
        inputs, outputs = rows * operator.width, operator.elements * self.batch
        element_bytes = method.compute_bytes if method.is_autocast else method.adapter_bytes
        use.backward.append(element_bytes * max(inputs, outputs))
        if operator.copies > 1:  # ``ParamWrapper`` adds the product to the weights of all experts
            matrices = method.matrix_elements(operator) * operator.copies
            use.own.append(method.base_bytes * matrices)
            use.forward.append(method.compute_bytes * matrices)
            return
        use.own.append(element_bytes * rows * method.lora_rank)
        if operator.name == "qkv_proj" and method.copies_parts:  # index_copy saves what it copies
            use.own.append(element_bytes * outputs)
        if method.lora_dropout:
            use.own += [inputs, element_bytes * inputs]
        else:
            is_same = widest == element_bytes == method.adapter_bytes
            use.keep(operator.inputs, 0 if is_same else element_bytes * inputs)
        use.forward += [element_bytes * outputs] * 2
        if method.method == "dora":
            use.own += [element_bytes * outputs, method.compute_bytes * outputs]
            use.forward += [FULL_BYTES * method.matrix_elements(operator)] * 2

    # ---- attention and loss

    def _attention(self, at: int, operator: Operator, widest: int) -> _Use:
        method, compute, elements = self.method, self.method.compute_bytes, self.elements[at]
        inputs = operator.inputs
        wide = [
            each for each in inputs if method.is_autocast and self.element_bytes[each] > compute
        ]
        use = _Use([each for each in (*inputs, at) if each not in wide])
        if method.attention == "math" or operator.name == EAGER:  # scores, in single operations
            positions = operator.elements // (operator.heads * operator.width)
            scores = float(FULL_BYTES * operator.heads * positions**2 * self.batch)
            raised = FULL_BYTES * sum(self.elements[each] for each in inputs)
            use.own = [scores, raised if compute < FULL_BYTES else 0]
            use.forward, use.backward = [scores], [scores] * 2
            return use
        use.own = [FULL_BYTES * (operator.elements // operator.width) * self.batch]
        use.own += [compute * self.elements[each] for each in wide]  # autocast's copies
        use.backward.append(FULL_BYTES * elements)
        return use

    def _loss(self, at: int, operator: Operator, widest: int) -> _Use:
        """Cross-entropy: copies of the logits, and the logarithms of their probabilities.

        ``transformers/loss/loss_utils.py`` copies the logits to fp32; older versions also copy them
        without the last position.  Otherwise autocast raises them.
        """
        method, compute = self.method, self.method.compute_bytes
        logits = operator.elements * self.batch
        if method.kernels != "none":
            return _Use()
        is_raised = method.raises_logits or method.is_autocast
        probabilities = float((FULL_BYTES if is_raised else compute) * logits)
        use = _Use(own=[probabilities])
        use.forward = [FULL_BYTES * logits] * (is_raised and compute < FULL_BYTES)
        use.forward += [method.logits_bytes * logits] * method.shifts_logits
        use.backward = [probabilities] * (2 * (method.library != "litgpt"))
        return use

    # ---- backward

    def _walk_backward(self, outputs: list[int]) -> None:
        live = self.live
        gradients = {at: live.take(self._bytes(at)) for at in outputs if self.needs_gradient[at]}
        for at, operator in reversed(list(enumerate(self.section.operators))):
            temporaries, saved = self.done[at]
            gradient = gradients.pop(at, None)
            if gradient is not None:
                held = [live.take(size) for size in temporaries]
                if operator.kind == "loss":  # one of them becomes the gradient of the logits
                    live.drop(*held)
                    held = []
                self._propagate(operator, gradients)
                live.drop(*held, gradient)
            live.drop(*saved)

    def _propagate(self, operator: Operator, gradients: dict[int, _Tensor]) -> None:
        """Adds the gradients of an operator's inputs to those that are there."""
        live = self.live
        for source in sorted(set(operator.inputs)):
            if not self.needs_gradient.get(source):
                continue
            new = live.take(self._bytes(source))
            if source in gradients:  # the sum overwrites it
                live.drop(new)
            else:
                gradients[source] = new
