"""Formulas for language models: Transformer Math 101, Korthikanti et al., LLMem."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from gpumemnet.job.training_job import TrainingJob
from gpumemnet.physics.element_types import ELEMENT_BYTES, FULL_BYTES, HALF_BYTES
from gpumemnet.physics.optimizers import OPTIMIZER_RULES
from gpumemnet.units import MIB
from research.estimators.estimator import NotCoveredError, PublishedEstimator, Subject
from research.estimators.formulas import parameters

HEAD_WIDTH: Final = 64
"""Assumed where neither the architecture nor a layer says how many heads there are: that of BERT,
GPT-2, OPT, T5 and ViT."""
_NORMS: Final = ("layer_norm", "rms_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """The numbers that formulas for transformers take.

    Attributes:
        hidden: width of the hidden state.
        layers: number of blocks, each with one attention; the two attentions of a decoder's block
            count twice.
        heads: heads of an attention.
        sequence: tokens per sample.
        vocabulary: outputs per token of the last layer; 0 where the model does not end in one
            output per token.
        embedding_parameters, other_parameters: of the embeddings, and of everything else.
        linear_parameters: those of each embedding and linear layer, in order.
    """

    hidden: int
    layers: int
    heads: int
    sequence: int
    vocabulary: int
    embedding_parameters: int
    other_parameters: int
    linear_parameters: tuple[int, ...]


def transformer_shape(subject: Subject) -> TransformerShape:
    """The shape of a transformer whose blocks all have one width.

    Raises:
        NotCoveredError: it is no transformer, or its blocks differ in width, as Swin's do.
    """
    job = subject.job
    if job.family != "transformer" or not job.sequence_length or not job.layers:
        raise NotCoveredError("no transformer with layers and a sequence length")
    widths = Counter(
        layer.activations // job.sequence_length for layer in job.layers if layer.kind in _NORMS
    )
    if len(widths) != 1:
        raise NotCoveredError("the blocks differ in width")
    hidden = next(iter(widths))
    kinds = Counter(layer.kind for layer in job.layers)
    embeddings = sum(layer.parameters for layer in job.layers if "embedding" in layer.kind)
    last = job.layers[-1]
    whole = last.activations // job.sequence_length if last.kind == "linear" else 0
    return TransformerShape(
        hidden=hidden,
        layers=kinds["attention"] or kinds["softmax"] or 1,
        heads=_heads(subject.architecture, hidden),
        sequence=job.sequence_length,
        vocabulary=whole if whole > hidden else 0,
        embedding_parameters=embeddings,
        other_parameters=_parameters(job) - embeddings,
        linear_parameters=tuple(
            layer.parameters
            for layer in job.layers
            if layer.kind == "linear" or "embedding" in layer.kind
        ),
    )


def _heads(architecture: Mapping[str, Any], hidden: int) -> int:
    stated = architecture.get("num_heads")
    return stated if isinstance(stated, int) else max(hidden // HEAD_WIDTH, 1)


def _parameters(job: TrainingJob) -> int:
    assert job.total_parameters is not None
    return job.total_parameters


def korthikanti_bytes(
    shape: TransformerShape, batch_size: int, element_bytes: int = HALF_BYTES
) -> int:
    """Activations that a transformer keeps: ``s b h (34 + 5 a s / h)`` per block in half precision.

    Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
    MLSys 2023, equation 1.  Two of
    the 34 bytes per element are masks of dropout, and one of the 5.

    Args:
        shape: of the transformer.
        batch_size: sequences in a batch.
        element_bytes: of an activation.
    """
    scale = element_bytes // HALF_BYTES
    per_element = 32 * scale + 2
    per_score = 4 * scale + 1
    tokens = shape.sequence * batch_size
    return (
        shape.layers
        * tokens
        * (per_element * shape.hidden + per_score * shape.heads * shape.sequence)
    )


def eleuther_activation_bytes(
    shape: TransformerShape, batch_size: int, element_bytes: int = HALF_BYTES
) -> int:
    """Activations without recomputation by "Transformer Math 101": ``s b h L (10 + 24 / t + 5 a s /
    (h t))``, with ``t = 1``.

    The blog takes Korthikanti's formula for half precision and doubles all of it for fp32, masks
    included.

    Args:
        shape, batch_size, element_bytes: as for :func:`korthikanti_bytes`.
    """
    tokens = shape.sequence * batch_size
    half = shape.layers * tokens * (34 * shape.hidden + 5 * shape.heads * shape.sequence)
    return half * element_bytes // HALF_BYTES


def _model_states(subject: Subject) -> dict[str, int]:
    """Weights, gradients and optimizer state in the precision of the job."""
    weights = parameters(subject.job) * FULL_BYTES
    return {
        "weights": weights,
        "gradients": weights,
        "optimizer state": round(weights * OPTIMIZER_RULES[subject.job.optimizer].state_copies),
    }


def eleuther_parts(subject: Subject) -> Mapping[str, int]:
    """Model states and activations of "Transformer Math 101"."""
    element = ELEMENT_BYTES[subject.job.precision].activation
    activations = eleuther_activation_bytes(
        transformer_shape(subject), subject.job.batch_size, element
    )
    return _model_states(subject) | {"activations": activations}


def korthikanti_parts(subject: Subject) -> Mapping[str, int]:
    """Model states, and the activations of Korthikanti et al."""
    element = ELEMENT_BYTES[subject.job.precision].activation
    return _model_states(subject) | {
        "activations": korthikanti_bytes(
            transformer_shape(subject), subject.job.batch_size, element
        )
    }


_formula = partial(
    PublishedEstimator,
    needs="layers",
    leaves_out="logits and loss, optimizer's temporaries, allocator, context",
)
ELEUTHER: Final = _formula(
    name="Transformer Math 101",
    source="EleutherAI, blog 'Transformer Math 101', 2023",
    parts=eleuther_parts,
)
KORTHIKANTI: Final = _formula(
    name="Korthikanti activations",
    source="Korthikanti et al., MLSys 2023, equation 1",
    parts=korthikanti_parts,
)


PAGE_BYTES: Final = 2 * MIB
CHUNK_ELEMENTS: Final = 16 * MIB
STATE_BYTES: Final = 2 * FULL_BYTES


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
