"""LLMem (Kim et al., IJCAI 2024, arXiv 2404.10933): memory of fine-tuning a language model on one
or several GPUs.

It assumes Gemini's chunks, fp16 parameters with fp32 masters, gradient checkpointing and Adam.  In
the paper the base memory is measured on the GPU after the weights lie there; an estimate made
beforehand cannot know it, so it is the context of the GPU's
profile here.  Also assumed: a chunk holds 32 MiB of fp16 parameters, and logits take two bytes an
    element (four only for two
models that the paper names).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpumemnet.physics.element_types import FULL_BYTES, HALF_BYTES
from gpumemnet.units import MIB

from .estimator import NotCoveredError, PublishedEstimator, Subject
from .transformer_shape import TransformerShape, transformer_shape

PAGE_BYTES: Final = 2 * MIB
CHUNK_ELEMENTS: Final = 16 * MIB
STATE_BYTES: Final = 2 * FULL_BYTES
METHODS: Final = ("data parallel", "ZeRO-3", "tensor parallel", "data and tensor parallel")
LARGEST_BATCH: Final = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmParts:
    """LLMem's five parts of the memory of one GPU, in bytes.

    Attributes:
        base: what lies on the GPU before the model.
        half, master: parameters in fp16 (gradients share them), and their fp32 copies.
        state: Adam's two moments.
        outputs: one hidden state per block.
        head: what the language-model head takes.
    """

    base: int
    half: int
    master: int
    state: int
    outputs: int
    head: int

    @property
    def single(self) -> int:
        """Memory of one GPU, or of each GPU with ordinary data parallelism."""
        return self.base + self.half + self.master + self.state + self.outputs + self.head

    def zero3(self, gpus: int) -> int:
        """Memory of each GPU where masters and state are divided."""
        return self.base + self.half + (self.master + self.state) // gpus + self.outputs + self.head

    def tensor(self, gpus: int) -> int:
        """Memory of each GPU where every matrix is divided; gathered outputs are added."""
        return (
            self.base
            + (self.half + self.master + self.state) // gpus
            + self.outputs
            + self.head
            + self._gathered(gpus)
        )

    def combined(self, data: int, tensor: int) -> int:
        """Memory of each GPU with ``data`` groups of ``tensor`` GPUs."""
        gpus = data * tensor
        return self.zero3(gpus) - self.half * tensor // gpus + self._gathered(tensor)

    def _gathered(self, gpus: int) -> int:
        return pages(self.outputs * (gpus - 1) // gpus)


def pages(size_bytes: float) -> int:
    """``size_bytes`` in whole pages of 2 MiB."""
    return -int(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def llm_parts(shape: TransformerShape, batch_size: int, base_bytes: int) -> LlmParts:
    """The five parts for one GPU.

    Args:
        shape: of the language model.
        batch_size: sequences on one GPU.
        base_bytes: what lies on the GPU before the model.
    """
    chunks = -(-shape.other_parameters // CHUNK_ELEMENTS) * CHUNK_ELEMENTS
    elements = shape.embedding_parameters + chunks
    logits = pages(batch_size * shape.sequence * shape.vocabulary * HALF_BYTES)
    shifted = pages(batch_size * (shape.sequence - 1) * shape.vocabulary * HALF_BYTES)
    embeddings = 1
    return LlmParts(
        base=base_bytes,
        half=pages(elements * HALF_BYTES),
        master=pages(elements * FULL_BYTES),
        state=sum(pages(count * STATE_BYTES) for count in shape.linear_parameters),
        outputs=pages(
            (embeddings + shape.layers) * batch_size * shape.sequence * shape.hidden * HALF_BYTES
        ),
        head=logits + 2 * shifted + pages(shape.vocabulary * shape.hidden * HALF_BYTES),
    )


def chosen_method(
    shape: TransformerShape, gpus: int, base_bytes: int, capacity_bytes: int
) -> tuple[str, int] | None:
    """LLMem's choice among :data:`METHODS`, and the batch size of a GPU; ``None`` where no method
    fits one sample.

    Each method gets the largest batch that fits, and a score: the samples of a step, half as many
    again for plain data parallelism.  With two dimensions, tensor groups are of two GPUs (assumed;
    the paper leaves the split open).

    Args:
        shape: of the language model.
        gpus: number of GPUs.
        base_bytes, capacity_bytes: of one GPU.
    """
    tensor = 2 if gpus % 2 == 0 else 1
    data = gpus // tensor
    best: tuple[float, str, int] | None = None
    for method, weight in zip(METHODS, (1.5 * gpus, gpus, 1, data), strict=True):
        if (method == METHODS[3]) and (tensor == 1 or data == 1):
            continue
        size = _largest_batch(shape, method, gpus, data, tensor, base_bytes, capacity_bytes)
        if size and (best is None or weight * size > best[0]):
            best = (weight * size, method, size)
    return None if best is None else best[1:]


def _largest_batch(
    shape: TransformerShape,
    method: str,
    gpus: int,
    data: int,
    tensor: int,
    base_bytes: int,
    capacity_bytes: int,
) -> int:
    def takes(size: int) -> int:
        parts = llm_parts(shape, size, base_bytes)
        amounts = (
            parts.single,
            parts.zero3(gpus),
            parts.tensor(gpus),
            parts.combined(data, tensor),
        )
        return amounts[METHODS.index(method)]

    fits, fails = 0, 1
    while takes(fails) <= capacity_bytes and fails < LARGEST_BATCH:
        fits, fails = fails, 2 * fails
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if takes(middle) <= capacity_bytes else (fits, middle)
    return fits


def parts(subject: Subject) -> Mapping[str, int]:
    """LLMem's parts on one GPU.

    Raises:
        NotCoveredError: the job is no language model with one output per token.
    """
    shape = transformer_shape(subject)
    if not shape.vocabulary:
        raise NotCoveredError("no language model: its last layer has no output per token")
    found = llm_parts(shape, subject.job.batch_size, subject.context_bytes)
    return {
        "base": found.base,
        "parameters": found.half + found.master,
        "optimizer state": found.state,
        "outputs": found.outputs,
        "head": found.head,
    }


LLMEM: Final = PublishedEstimator(
    name="LLMem",
    needs="layers",
    leaves_out="activations within blocks (it assumes checkpointing), fp32 activations; language models only",
    source="Kim et al., IJCAI 2024, arXiv 2404.10933",
    parts=parts,
)
