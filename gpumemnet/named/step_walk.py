"""The peak of a training step of a named model: one block is walked through, and counts as often as
it stands in the network (:mod:`gpumemnet.named.block_walk`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpumemnet.named.block_walk import Amounts, BlockMemory, block_memory, tensors
from gpumemnet.named.methods import Method
from gpumemnet.named.operators import EMBEDDINGS, HEAD, Network, Section
from gpumemnet.physics.element_types import FULL_BYTES
from gpumemnet.physics.replicas import communicator_bytes
from gpumemnet.physics.step_memory import BLOCK_CLASSES, BLOCK_TOPS

_BUCKET_ELEMENTS: Final = 2 * 2 * 10**8
"""Gradients that DeepSpeed's stage 2 reduces at once, in two buffers of the size that its examples
state (``reduce_bucket_size``)."""
_GATHERED_UNITS: Final = 2
"""Blocks whose weights FSDP holds at once: the one that runs and the one fetched ahead."""


PARTS: Final = (
    *("base_weights_bytes", "adapters_bytes", "gradients_bytes", "optimizer_bytes"),
    *("activations_bytes", "logits_bytes", "workspace_bytes", "fragmentation_bytes"),
)
"""What a step's peak is made of.  Activations are what blocks keep and compute with; logits count
with their loss and the gradients of both; the workspace is that of cuBLAS, and NCCL's buffers;
fragmentation is what the allocator reserves beyond what is in use."""


class StepPeak(NamedTuple):
    """The peak of a training step on one GPU, without the CUDA context.

    Attributes:
        parts: each of :data:`PARTS`, at the peak.
        moment: when the peak is.
    """

    parts: Mapping[str, int]
    moment: str

    @property
    def reserved_bytes(self) -> int:
        """What the allocator reserves, and NCCL holds."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class ProcessPeak:
    """The peak of a training process, by either depth.

    Attributes:
        parameters, trained_parameters: elements of the model, and those that receive gradients.
        expected_bytes, safe_bytes: of the process on one GPU, CUDA context included.
        parts: what the expected bytes are made of.
        moment: when the peak is.
        notes: what was assumed.
    """

    parameters: int
    trained_parameters: int
    expected_bytes: int
    safe_bytes: int
    parts: Mapping[str, int]
    moment: str
    notes: tuple[str, ...]


class _Moment(NamedTuple):
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


class Step:
    """A training step, which adds the blocks of a network up.

    Args:
        network: the model, at the sequence length of ``method``.
        method: how it is trained.
        workspace_bytes: of cuBLAS, for each of the two threads of a training process.
    """

    def __init__(self, network: Network, method: Method, workspace_bytes: float) -> None:
        self.method = method
        self.blocks = [block_memory(each, method) for each in network.sections]
        self.counted = [*self.blocks]
        """All blocks, and what the head shares with the embedding once less."""
        self.tied = tensors(0)
        """The sum of a shared embedding's gradients, while those of its two readers are there."""
        if network.tied_parameters:
            shared = Section("tied", -1, is_checkpointed=False)
            shared.add("embedding", (), 0, parameters=network.tied_parameters)
            self.counted.append(block_memory(shared, method))
            self.tied = self.counted[-1].gradients
        self.shares = method.gpus if method.is_sharded else 1
        self.workspace_bytes = 2.0 * workspace_bytes
        is_raised = method.is_sharded and method.is_autocast and not method.has_adapters
        self.growth = FULL_BYTES / method.outer_bytes if is_raised else 1.0
        """FSDP keeps trained weights in fp32 (accelerate with mixed precision)."""
        self.keeps_gradients = method.gradient_accumulation > 1 and self.shares == 1
        self.gradients = self._total("gradients")
        self.new_gradients = self.growth / self.shares
        """Copies of the gradients that the backward pass creates on each GPU."""
        if self.keeps_gradients:
            self.new_gradients = 0.0
        elif method.splits_states:
            self.new_gradients = 1.0 / method.gpus
        elif method.parallel == "ddp" and method.gpus > 1:
            self.new_gradients = 2.0
        is_held = method.is_reentrant and method.has_adapters
        self.holds_inputs = is_held and method.is_sharded and method.parallel == "fsdp1"
        """Whether blocks whose backward pass has run still hold their input and its gradient.

        FSDP1 waits for the gradients of a frozen block's inputs by a hook that keeps their
        accumulators (``register_multi_grad_hook``), and these the tensors, until the step's end.
        With re-entrant checkpointing such an input is a leaf of its own.
        """

    def peak(self) -> StepPeak:
        """The largest of all moments."""
        method, resident, moments = self.method, self._resident(), self._moments()
        peak = max(moments, key=lambda moment: float(moment.held[0]))
        stays = sum(resident.values(), tensors(0))
        allocated = stays[0] + peak.held[0]
        stays = stays + tensors(self.workspace_bytes / 2, 2.0)
        reserved = sum(stays[1:]) + _segments(moments) + self._misfit_bytes()
        sizes = {name: amounts[0] for name, amounts in resident.items()}
        sizes["gradients_bytes"] += peak.gradients[0]
        buckets = _BUCKET_ELEMENTS * method.compute_bytes * method.splits_states
        sizes |= {
            "activations_bytes": peak.held[0] - peak.gradients[0] - peak.logits,
            "logits_bytes": peak.logits,
            "workspace_bytes": self.workspace_bytes + communicator_bytes((method.gpus,)) + buckets,
            "fragmentation_bytes": max(reserved - allocated - self.workspace_bytes, 0.0),
        }
        return StepPeak({name: round(sizes[name]) for name in PARTS}, peak.name)

    def _misfit_bytes(self) -> float:
        """A segment more where the loss copies the logits without their last position.

        The backward pass ends with a gradient of all positions; the segments that are free by then
        are one position too small.
        """
        method = self.method
        fits = method.is_autocast and not method.raises_logits  # where the logits were
        if not method.shifts_logits or method.kernels != "none" or fits:
            return 0.0
        logits = self.blocks[-1].section.operators[-1].elements
        return method.logits_bytes * logits * method.batch_size

    def _total(self, name: str, *, is_outer: bool = False) -> Amounts:
        """Weights, adapters or gradients, shared ones once; or of what is outside of the blocks."""
        sizes = (
            getattr(block, name) * block.section.count
            for block in self.counted
            if not (is_outer and block.section.is_checkpointed)
        )
        return sum(sizes, tensors(0))

    def _resident(self) -> dict[str, Amounts]:
        """What stays from step to step."""
        method, shares, state = self.method, self.shares, tensors(0)
        for block in self.counted:
            for elements, element_bytes in block.trained:
                is_copied = method.splits_states and element_bytes < FULL_BYTES
                width = FULL_BYTES if is_copied else element_bytes * self.growth
                state += tensors(
                    method.state_bytes(elements, width) + is_copied * width * elements,
                    block.section.count / (method.gpus if method.splits_states else shares),
                )
        return {
            "base_weights_bytes": self._total("weights") * (self.growth / shares),
            "adapters_bytes": self._total("adapters") / shares,
            "optimizer_bytes": state,
            "gradients_bytes": self.gradients * self.keeps_gradients,
        }

    def _moments(self) -> list[_Moment]:
        """The moments of a step, in their order."""
        forward: list[_Moment] = []
        backward: list[_Moment] = []
        before = tensors(0)
        if self.shares > 1:  # from one buffer of all
            outside = self._gathered(tensors(0))
            forward.append(_Moment("gathering of weights", outside + tensors(outside[0]), before))
        later = (self.gradients + self.tied) * self.new_gradients
        for block in self.blocks:
            section, kept, last = block.section, block.saved, block.section.count - 1
            created = block.gradients * self.new_gradients
            later = later - created * section.count
            gathered = self._gathered(block.weights * (_GATHERED_UNITS * section.is_checkpointed))
            logits = self._logits(block) if section.name == HEAD else 0.0
            held = before + kept * last + block.forward + gathered
            forward.append(_Moment(f"forward pass of {section.name}", held, tensors(0), logits))
            for number in sorted({0, last}):
                gradients = later + created * (last - number + 1.0)
                held = before + kept * (number + block.is_recomputed) + block.backward + gradients
                held += gathered + self._unreduced(block)
                if section.name == EMBEDDINGS:
                    held += self.tied
                if self.holds_inputs and block.is_recomputed:
                    held += kept * (2.0 * (last - number))
                name = f"backward pass of {section.name}"
                backward.append(_Moment(name, held, gradients, logits))
            before = before + kept * section.count
        return [*forward, *backward[::-1], self._optimizer_step()]

    def _logits(self, head: BlockMemory) -> float:
        """The part of what the head holds that is logits and their loss."""
        method = self.method
        hidden = 3.0 * head.section.input_elements * method.batch_size * method.compute_bytes
        return max(float(max(head.forward[0], head.backward[0])) - hidden, 0.0)

    def _gathered(self, blocks: Amounts) -> Amounts:
        """Weights that sharded training gathers, in the type of the computation.

        What lies outside of the blocks is one group, which stays (``fully_shard`` of the model).
        """
        if self.shares == 1:
            return tensors(0)
        narrowed = min(self.method.compute_bytes / self.method.outer_bytes, 1.0)
        return (blocks + self._total("weights", is_outer=True)) * narrowed

    def _unreduced(self, block: BlockMemory) -> Amounts:
        """Gradients of whole weights in sharded training, and their copies for the reduction."""
        if self.shares == 1 or block.section.name == HEAD:
            return tensors(0)
        outside = self._total("gradients", is_outer=True)
        if block.section.is_checkpointed:
            return block.gradients * self.growth + outside
        return tensors(outside[0] * self.growth)

    def _optimizer_step(self) -> _Moment:
        method, new = self.method, self.gradients * self.new_gradients
        copies = method.step_copies() * self.growth / self.shares
        if method.splits_states:  # the gradients in fp32, for the copies of the weights
            copies += FULL_BYTES / method.outer_bytes / method.gpus
        return _Moment("optimizer step", new + self.gradients * copies, new)
