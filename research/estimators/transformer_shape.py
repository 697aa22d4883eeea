"""Width, depth, heads and vocabulary of a transformer, read from its layers: what the formulas for
transformers ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpumemnet.job.training_job import TrainingJob

from .estimator import NotCoveredError, Subject

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
