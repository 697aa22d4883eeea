"""Transformers: encoder, decoder, encoder–decoder and vision transformer, with a chosen attention
kernel.

GPUMemNet's transformers (arXiv 2602.17817, section 4) were PyTorch's stock blocks.  This space
contains networks that people train: GPT-2, BERT (arXiv 1810.04805), T5 (arXiv 1910.10683), Llama
(arXiv 2302.13971) and ViT (arXiv 2010.11929) up to details that do not change memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from . import Architecture, RoughSizes, TensorSpec, features

if TYPE_CHECKING:
    from torch import nn

FEATURES: Final = features("transformer")
IMAGE_CHANNELS: Final = 3

GRANULE: Final = 8
"""Head sizes and feed-forward widths are multiples of this: the memory-efficient kernel requires it
in half precision."""
_HEAD_COUNTS: Final = tuple(
    sorted({1} | {factor * 2**power for factor in (2, 3, 5) for power in range(10)})
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerArchitecture(Architecture):
    """Every parameter of a transformer.

    Fields that a style does not use are 0, so that equal networks are equal architectures.

    Attributes:
        style: ``encoder`` (BERT), ``decoder`` (causal, GPT), ``encoder_decoder`` (T5), ``vision``
            (ViT).
        encoder_depth, decoder_depth: blocks of each stack; a vision transformer is an encoder.
        width: elements of one position between the blocks.
        heads: query heads; they divide the width.
        key_value_heads: heads of keys and values; 1 is multi-query attention (arXiv 1911.02150),
            fewer than ``heads`` is grouped-query attention (arXiv 2305.13245).
        feed_forward_width: elements of one position inside the feed-forward part.
        gated: whether a second projection is multiplied with the activation (SwiGLU, GeGLU; arXiv
            2002.05202).
        activation: see :data:`FEATURES`.
        norm: see :data:`FEATURES`.
        norm_position: ``pre`` also has a norm at the end of each stack (arXiv 2002.04745).
        positions: ``learned`` embeddings, ``rotary`` (arXiv 2104.09864) in every self-attention, or
            none.
        bias: whether linear layers and layer norms have a bias; language-model heads never do.
        fused_projection: whether queries, keys and values come from one linear layer; in
            cross-attention, keys and values.
        dropout: after the embedding and at the end of every branch; 0 leaves the layers out.
        attention_dropout: of the attention weights.
        attention_kernel: the backend of PyTorch's
            ``scaled_dot_product_attention``.
        sequence_length: tokens per sample; of an ``encoder_decoder`` those of the source; of
            ``vision`` a square of patches and the class token.
        target_length: target tokens per sample of an ``encoder_decoder``.
        vocabulary: tokens; 0 where images go in.
        patch_size: side of a patch in pixels.
        head: ``tied`` to the token embedding or ``untied``, both over the vocabulary at every
            position; ``classes`` at the first position.
        classes: of that head.
    """

    style: str
    encoder_depth: int
    decoder_depth: int
    width: int
    heads: int
    key_value_heads: int
    feed_forward_width: int
    gated: bool
    activation: str
    norm: str
    norm_position: str
    positions: str
    bias: bool
    fused_projection: bool
    dropout: float
    attention_dropout: float
    attention_kernel: str
    sequence_length: int
    target_length: int
    vocabulary: int
    patch_size: int
    head: str
    classes: int

    @property
    def head_size(self) -> int:
        """Elements of one head at one position."""
        return self.width // self.heads

    @property
    def image_size(self) -> int:
        """Side of the image in pixels."""
        return math.isqrt(self.sequence_length - 1) * self.patch_size

    @property
    def predicted_length(self) -> int:
        """Positions that the head answers for."""
        return 1 if self.head == "classes" else self.target_length or self.sequence_length


ARCHITECTURE: Final = TransformerArchitecture
_TAKEN_OVER: Final = (
    *(
        "style",
        "gated",
        "activation",
        "norm",
        "norm_position",
        "positions",
        "bias",
        "fused_projection",
    ),
    *("dropout", "attention_dropout", "attention_kernel"),
)
"""Features that are fields of the architecture under the same name."""


def compose(values: Mapping[str, Any]) -> TransformerArchitecture:
    """The architecture for one value of every feature in :data:`FEATURES`.

    The number of heads is the usual one (1, 2, 3 or 5 times a power of two) nearest to width ÷ head
    size, and the width is what they make.  ``heads_per_group`` and ``sequence_length`` go down or
    to the nearest that fits, and half of an ``encoder_decoder``'s blocks decode.
    """
    style = values["style"]
    vision, both = style == "vision", style == "encoder_decoder"
    heads = min(
        _HEAD_COUNTS, key=lambda count: abs(math.log(count * values["head_size"] / values["width"]))
    )
    width = heads * (values["head_size"] // GRANULE * GRANULE)
    group = max(
        count for count in range(1, min(heads, values["heads_per_group"]) + 1) if heads % count == 0
    )
    depth = values["depth"]
    decoder_depth = {"decoder": depth, "encoder_decoder": max(1, depth // 2)}.get(style, 0)
    sequence_length = values["sequence_length"]
    if vision:
        sequence_length = max(1, round(math.sqrt(sequence_length - 1))) ** 2 + 1
    head = values["head"]
    if vision:
        head = "classes"
    elif style != "encoder" and head == "classes":
        head = "untied"
    return TransformerArchitecture(
        **{name: values[name] for name in _TAKEN_OVER},
        encoder_depth=0 if style == "decoder" else max(1, depth - decoder_depth),
        decoder_depth=decoder_depth,
        width=width,
        heads=heads,
        key_value_heads=heads // group,
        feed_forward_width=max(
            GRANULE, round(width * values["feed_forward_ratio"] / GRANULE) * GRANULE
        ),
        sequence_length=sequence_length,
        target_length=max(1, round(sequence_length * values["target_share"])) if both else 0,
        vocabulary=0 if vision else values["vocabulary"],
        patch_size=values["patch_size"] if vision else 0,
        head=head,
        classes=values["classes"] if head == "classes" else 0,
    )


def can_train(architecture: TransformerArchitecture, batch_size: int) -> bool:
    """Every network trains at every batch size."""
    return True


def rough_sizes(architecture: TransformerArchitecture) -> RoughSizes:
    """See :class:`~dataset_builder.families.RoughSizes`."""
    a = architecture
    shared = 2 * a.key_value_heads * a.head_size
    feed_forward = (2 + a.gated) * a.width * a.feed_forward_width
    parameters = activations = multiply_adds = 0
    for depth, length, crosses in (
        (a.encoder_depth, a.sequence_length, 0),
        (a.decoder_depth, a.target_length or a.sequence_length, a.style == "encoder_decoder"),
    ):
        weights = (1 + crosses) * (2 * a.width + shared) * a.width + feed_forward
        scores = 2 * a.heads * length**2 if a.attention_kernel == "math" else 0
        mixed = (1 + crosses) * (4 * a.width + shared + a.width * (1 + (a.dropout > 0)))
        inner = (3 + (a.dropout > 0)) * a.width + (2 + 2 * a.gated) * a.feed_forward_width
        parameters += depth * weights
        activations += depth * (length * (mixed + inner) + scores)
        multiply_adds += depth * length * (weights + 2 * (1 + crosses) * length * a.width)
    outputs = a.predicted_length * (a.classes or a.vocabulary)
    head = a.width * (a.classes or a.vocabulary)
    embedding = a.width * (a.vocabulary or IMAGE_CHANNELS * a.patch_size**2)
    return RoughSizes(
        parameters + embedding + (0 if a.head == "tied" else head),
        activations + outputs,
        outputs,
        multiply_adds + a.predicted_length * head,
    )


def build(architecture: TransformerArchitecture) -> nn.Module:
    """The network on torch's current default device.

    It maps tokens ``[batch, sequence_length]`` (and, in an ``encoder_decoder``, target tokens
    ``[batch, target_length]``), or images ``[batch, 3, image_size, image_size]``, to logits:
    ``[batch, classes]``, or over the vocabulary at every position ``[batch, sequence_length or
    target_length, vocabulary]``.
    """
    from .transformer_modules import Transformer

    return Transformer(architecture)


def tensors(architecture: TransformerArchitecture) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
    """Tokens or one image; one class, or one token for every position.

    The targets of a language model are the next tokens.  The data loader has shifted them, so no
    logits are cut off or copied.
    """
    a = architecture
    inputs = [TensorSpec((a.sequence_length,), a.vocabulary)]
    if a.style == "vision":
        inputs = [TensorSpec((IMAGE_CHANNELS, a.image_size, a.image_size))]
    elif a.style == "encoder_decoder":
        inputs.append(TensorSpec((a.target_length,), a.vocabulary))
    target = (
        TensorSpec((), a.classes)
        if a.head == "classes"
        else TensorSpec((a.predicted_length,), a.vocabulary)
    )
    return tuple(inputs), target
