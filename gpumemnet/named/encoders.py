"""Blocks of encoders, of encoders with a decoder, and of vision transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from gpumemnet.named.operators import (
    BLOCK_INPUT,
    HEAD,
    OUTER_INPUT,
    Network,
    Operator,
    Section,
    count_of,
)

EAGER: Final = "eager_attention"
"""Name of an attention in single operations, whatever kernel PyTorch would choose."""
_CLASSES: Final = 2


@dataclass(frozen=True)
class Stack:
    """Equal blocks of attention and a feed-forward layer.

    Attributes:
        name: class of a block.
        hidden, heads, head_width, middle: widths.
        tokens: positions of one sample.
        norm: ``layer_norm`` or ``rms_norm``.
        activation: kind of the activation.
        is_gated: whether the feed-forward layer multiplies two projections.
        reads_norm: whether norms come before attention and feed-forward layer, not behind the sums.
        biases: of queries, keys, values, output and feed-forward layer.
        norm_bias: whether a norm has a shift.
        has_dropout: whether dropout follows attention and feed-forward layer.
        scales: whether a layer scale does.
        outer_tokens: positions that a cross-attention reads; 0 without one.
        is_eager: whether attention is computed in single operations.
        is_joined: whether queries, keys and values, and gate and up, are one layer.
    """

    name: str
    hidden: int
    heads: int
    middle: int
    tokens: int
    head_width: int = 0
    norm: str = "layer_norm"
    activation: str = "gelu"
    is_gated: bool = False
    reads_norm: bool = True
    biases: str = "qkvom"
    norm_bias: bool = True
    has_dropout: bool = False
    scales: bool = False
    outer_tokens: int = 0
    is_eager: bool = False
    is_joined: bool = False

    def section(self, count: int) -> Section:
        """So many of these blocks."""
        section = Section(self.name, count, self.tokens * self.hidden)
        last = self._residual(section, BLOCK_INPUT, lambda source: self.attention(section, source))
        if self.outer_tokens:
            last = self._residual(section, last, lambda source: self._crossing(section, source))
        self._residual(section, last, lambda source: self.feed_forward(section, source))
        return section

    def add_norm(self, section: Section, source: int, name: str = "layer_norm") -> int:
        """Adds a norm of the hidden state."""
        parameters = self.hidden * (2 if self.norm == "layer_norm" and self.norm_bias else 1)
        shape = self.tokens * self.hidden
        return section.add(self.norm, source, shape, name, parameters=parameters)

    def _residual(self, section: Section, source: int, build: Callable[[int], int]) -> int:
        shape = self.tokens * self.hidden
        inner = build(self.add_norm(section, source) if self.reads_norm else source)
        if self.has_dropout:
            inner = section.add("dropout", inner, shape)
        if self.scales:
            inner = section.add("multiply", inner, shape, "layer_scale", parameters=self.hidden)
        total = section.add("add", (source, inner), shape)
        return total if self.reads_norm else self.add_norm(section, total)

    def attention(self, section: Section, source: int) -> int:
        """Adds the attention of a block to itself."""
        return self._attend(section, source, source, self.tokens)

    def _crossing(self, section: Section, source: int) -> int:
        return self._attend(section, source, OUTER_INPUT, self.outer_tokens)

    def _attend(self, section: Section, source: int, other: int, rows: int) -> int:
        """Queries of ``source``, keys and values of ``rows`` vectors of ``other``."""
        width = self.head_width or self.hidden // self.heads
        inner = self.heads * width
        if self.is_joined:
            bias = "q" in self.biases
            joined = section.linear(source, rows, (self.hidden, 3 * inner), "qkv_proj", bias)
            inputs: tuple[int, ...] = (joined,) * 3
        else:
            inputs = tuple(
                section.linear(
                    read, count, (self.hidden, inner), f"{part}_proj", part in self.biases
                )
                for part, read, count in (
                    ("q", source, self.tokens),
                    ("k", other, rows),
                    ("v", other, rows),
                )
            )
        name = EAGER if self.is_eager else "attention"
        shape = self.tokens * inner
        attended = section.add("attention", inputs, shape, name, heads=self.heads, width=width)
        sizes = (inner, self.hidden)
        return section.linear(attended, self.tokens, sizes, "o_proj", "o" in self.biases)

    def feed_forward(self, section: Section, source: int) -> int:
        """Adds the feed-forward layer."""
        gate = "joined" if self.is_joined else "split"
        return section.feed_forward(
            *(source, self.tokens, (self.hidden, self.middle), self.activation),
            gate=gate if self.is_gated else "",
            bias="m" in self.biases,
        )


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Widths of a stack under the names of most configurations."""
    hidden = count_of(config, "hidden_size", "d_model", "dim")
    return {
        "hidden": hidden,
        "heads": count_of(config, "num_attention_heads", "num_heads", "n_heads"),
        "middle": count_of(config, "intermediate_size", "d_ff", "hidden_dim", default=4 * hidden),
    }


def _embeddings(config: Mapping[str, Any], tokens: int, tables: list[int], width: int) -> Section:
    """Sums of embeddings: words, positions, and others."""
    section = Section("Embeddings", 1, is_checkpointed=False)
    shape = tokens * width
    last = -1
    for rows in tables:
        found = section.add("embedding", BLOCK_INPUT, shape, "embed", parameters=rows * width)
        last = found if last < 0 else section.add("add", (last, found), shape)
    return section


def _text_encoder(config: Mapping[str, Any], tokens: int) -> Network:
    """BERT and its relatives, with the pooler where the class has one, and a loss of few classes."""
    kind = str(config["model_type"])
    sizes, blocks = _sizes(config), count_of(config, "num_hidden_layers", "n_layers")
    hidden = sizes["hidden"]
    stack = Stack("BertLayer", **sizes, tokens=tokens, reads_norm=False, has_dropout=True)
    positions = count_of(config, "max_position_embeddings", default=512)
    vocabulary = count_of(config, "vocab_size")
    width = count_of(config, "embedding_size", default=hidden)
    tables = [vocabulary, positions]
    if config.get("type_vocab_size"):
        tables.append(config["type_vocab_size"])
    if kind == "modernbert":
        tables = [vocabulary]
        stack = replace(
            *(stack,),
            reads_norm=True,
            has_dropout=False,
            is_gated=True,
            is_joined=True,
            biases="",
            norm_bias=False,
            name="ModernBertEncoderLayer",
        )
    if kind == "deberta-v2":
        tables = [vocabulary]
        stack = replace(stack, is_eager=True, name="DebertaV2Layer")
    outer = _embeddings(config, tokens, tables, width)
    bias = 1 if kind == "modernbert" else 2
    last = len(outer.operators) - 1
    last = outer.add("layer_norm", last, tokens * width, "norm", parameters=bias * width)
    if stack.has_dropout:
        last = outer.add("dropout", last, tokens * width)
    if width != hidden:
        last = outer.linear(last, tokens, (width, hidden), "embeddings_project", True)
    if kind == "deberta-v2":
        buckets = 2 * count_of(config, "position_buckets", default=256)
        outer.add("other", last, tokens * hidden, "rel_embeddings", parameters=buckets * hidden)
    section = stack.section(blocks)
    sections = [outer, section]
    if kind == "albert":  # every block has the weights of the first
        section.count = 1
        shared = [each._replace(parameters=0) for each in section.operators]
        sections.append(Section("AlbertLayer", blocks - 1, section.input_elements, shared))
    head = Section(HEAD, 1, tokens * hidden, is_checkpointed=False)
    last = BLOCK_INPUT
    if kind == "modernbert":
        last = stack.add_norm(head, last)
    pooled = kind not in ("distilbert", "electra", "deberta-v2", "modernbert")
    if pooled:
        last = head.linear(last, 1, (hidden, hidden), "pooler", True)
    head.add("loss", last, _CLASSES)
    return Network((*sections, head), tokens, _CLASSES, is_causal=False)


def _t5(config: Mapping[str, Any], tokens: int) -> Network:
    """T5 (arXiv 1910.10683): the target has as many tokens as the source."""
    gated = "gated" in str(config.get("feed_forward_proj", "relu"))
    hidden = count_of(config, "hidden_size", "d_model")
    stack = Stack(
        "T5Block",
        hidden,
        count_of(config, "num_attention_heads", "num_heads"),
        count_of(config, "intermediate_size", "d_ff"),
        tokens,
        head_width=count_of(config, "head_dim", "d_kv", default=64),
        norm="rms_norm",
        activation="gelu" if gated else "relu",
        is_gated=gated,
        biases="",
        has_dropout=True,
        is_eager=True,
    )
    vocabulary = count_of(config, "vocab_size")
    blocks = count_of(config, "num_hidden_layers", "num_layers")
    encoder = stack.section(blocks)
    between = Section("EncoderNorm", 1, tokens * hidden, is_checkpointed=False)
    stack.add_norm(between, BLOCK_INPUT)
    outer = _embeddings(config, tokens, [vocabulary], hidden)
    if "Encoder" in str((config.get("architectures") or [""])[0]):
        between.add("loss", 0, _CLASSES)
        return Network((outer, encoder, between), tokens, _CLASSES, is_causal=False)
    decoder = replace(stack, outer_tokens=tokens).section(
        count_of(config, "num_decoder_layers", default=blocks)
    )
    head = Section(HEAD, 1, tokens * hidden, is_checkpointed=False)
    last = stack.add_norm(head, BLOCK_INPUT)
    logits = head.linear(last, tokens, (hidden, vocabulary), "lm_head")
    head.add("loss", logits, tokens * vocabulary)
    is_tied = config.get("tie_word_embeddings", True)
    return Network(
        (outer, encoder, between, decoder, head),
        tokens,
        vocabulary,
        hidden * vocabulary if is_tied else 0,
        is_causal=False,
    )


def _bart(config: Mapping[str, Any], tokens: int) -> Network:
    """BART and Whisper: a decoder that reads an encoder, with shared embeddings."""
    is_audio = config["model_type"] == "whisper"
    sizes = _sizes(config)
    hidden = sizes["hidden"]
    frames = count_of(config, "max_source_positions", default=1500) if is_audio else tokens
    longest = 448 if is_audio else count_of(config, "max_position_embeddings", default=1024) + 2
    target = min(tokens, longest)
    biases = "qvom" if is_audio else "qkvom"
    name = "Whisper" if is_audio else "Bart"
    stack = Stack(
        f"{name}EncoderLayer",
        **sizes,
        tokens=frames,
        biases=biases,
        reads_norm=is_audio,
        has_dropout=not is_audio,
    )
    vocabulary = count_of(config, "vocab_size")
    blocks = count_of(config, "num_hidden_layers", "encoder_layers")
    if is_audio:
        outer = Section("Stem", 1, is_checkpointed=False)
        bins = count_of(config, "num_mel_bins", default=80)
        last = _convolution(outer, BLOCK_INPUT, 2 * frames * hidden, 3 * bins * hidden + hidden)
        last = outer.add("gelu", last, 2 * frames * hidden)
        last = _convolution(outer, last, frames * hidden, 3 * hidden * hidden + hidden)
        last = outer.add("gelu", last, frames * hidden)
        last = outer.add("add", last, frames * hidden, parameters=frames * hidden)
    else:
        outer = _embeddings(config, tokens, [longest], hidden)
        stack.add_norm(outer, 0)
    between = Section("DecoderEmbeddings", 1, frames * hidden, is_checkpointed=False)
    words = between.add(
        "embedding", OUTER_INPUT, target * hidden, "embed_tokens", parameters=vocabulary * hidden
    )
    positions = between.add(
        "embedding", OUTER_INPUT, target * hidden, "positions", parameters=longest * hidden
    )
    between.add("add", (words, positions), target * hidden)
    aimed = replace(
        stack, name=f"{name}DecoderLayer", tokens=target, outer_tokens=frames,
        middle=count_of(config, "decoder_ffn_dim", default=stack.middle),
    )  # fmt: skip
    aimed.add_norm(between, 2)
    decoder = aimed.section(count_of(config, "decoder_layers", default=blocks))
    head = Section(HEAD, 1, target * hidden, is_checkpointed=False)
    last = aimed.add_norm(head, BLOCK_INPUT) if is_audio else BLOCK_INPUT
    logits = head.linear(last, target, (hidden, vocabulary), "lm_head")
    head.add("loss", logits, target * vocabulary)
    return Network(
        (outer, stack.section(blocks), between, decoder, head),
        target,
        vocabulary,
        hidden * vocabulary,
        is_causal=False,
    )


def _convolution(section: Section, source: int, elements: int, parameters: int) -> int:
    return section.add("conv1d", source, elements, "conv", parameters=parameters)


def _vision_sections(config: Mapping[str, Any], name: str) -> tuple[list[Section], Stack]:
    """Patches, positions and blocks of a vision transformer (arXiv 2010.11929)."""
    sizes = _sizes(config)
    hidden, patch = sizes["hidden"], count_of(config, "patch_size", default=16)
    side = count_of(config, "image_size", default=224) // patch
    has_class = name != "Siglip"
    tokens = side * side + has_class
    activation = str(config.get("hidden_act") or config.get("mlp_type") or "gelu")
    stack = Stack(
        f"{name}Layer",
        **sizes,
        tokens=tokens,
        activation="silu" if "swiglu" in activation or "quick" in activation else "gelu",
        scales=name == "Dinov2",
        biases="qkvom",
    )
    if config.get("use_swiglu_ffn"):
        middle = config.get("intermediate_size") or (int(stack.middle * 2 / 3) + 7) // 8 * 8
        stack = replace(stack, is_gated=True, is_joined=True, middle=middle)
    outer = Section("Patches", 1, is_checkpointed=False)
    bias = 0 if name == "CLIPEncoder" else hidden
    patches = outer.add(
        "conv2d", BLOCK_INPUT, side * side * hidden, "patch_embedding",
        parameters=3 * patch * patch * hidden + bias,
    )  # fmt: skip
    extra = hidden * (tokens + has_class + (1 if name == "Dinov2" else 0))
    last = outer.add("add", patches, tokens * hidden, "positions", parameters=extra)
    if name == "CLIPEncoder":
        stack.add_norm(outer, last)
    return [outer, stack.section(count_of(config, "num_hidden_layers", "depth"))], stack


def _vision(config: Mapping[str, Any], tokens: int) -> Network:
    """ViT and DINOv2 with a classifier."""
    name = "Dinov2" if config["model_type"] == "dinov2" else "ViT"
    sections, stack = _vision_sections(config, name)
    head = Section(HEAD, 1, stack.tokens * stack.hidden, is_checkpointed=False)
    last = stack.add_norm(head, BLOCK_INPUT)
    classes = count_of(config, "num_labels", default=_CLASSES)
    if config.get("counted_as") == "ViTModel":
        last = head.linear(last, 1, (stack.hidden, stack.hidden), "pooler", True)
    elif config.get("num_labels"):
        last = head.linear(last, 1, (stack.hidden, classes), "classifier", True)
    head.add("loss", last, classes)
    return Network((*sections, head), stack.tokens, classes, is_causal=False)


def _contrastive(config: Mapping[str, Any], tokens: int) -> Network:
    """CLIP and SigLIP: a text and an image encoder."""
    name = "Siglip" if config["model_type"] == "siglip" else "CLIPEncoder"
    text = config.get("text_config") or config
    sizes = _sizes(text)
    longest = count_of(text, "max_position_embeddings", default=77)
    length = min(tokens, longest)
    stack = Stack(f"{name}Layer", **sizes, tokens=length)
    hidden = sizes["hidden"]
    tables = [count_of(text, "vocab_size"), longest]
    sections = [_embeddings(text, length, tables, hidden)]
    sections.append(stack.section(count_of(text, "num_hidden_layers")))
    between = Section("TextHead", 1, length * hidden, is_checkpointed=False)
    last = stack.add_norm(between, BLOCK_INPUT)
    projection = count_of(config, "projection_dim", default=hidden)
    vision = config.get("vision_config")
    if vision is None:  # the text encoder of a diffusion pipeline
        if config.get("projection_dim"):
            last = between.linear(last, 1, (hidden, projection), "text_projection")
        between.add("loss", last, _CLASSES)
        return Network((*sections, between), length, _CLASSES, is_causal=False)
    is_siglip = name == "Siglip"
    between.linear(last, 1, (hidden, projection), "text_projection", is_siglip)
    seen, images = _vision_sections(vision, name)
    head = Section(HEAD, 1, images.tokens * images.hidden, is_checkpointed=False)
    last = images.add_norm(head, BLOCK_INPUT)
    if is_siglip:
        last = images.attention(head, last)
        last = images.add_norm(head, last)
        images.feed_forward(head, last)
        head.add("other", last, images.hidden, "probe", parameters=images.hidden)
    else:
        head.linear(last, 1, (images.hidden, projection), "visual_projection")
    head.add("loss", last, _CLASSES)
    return Network((*sections, between, *seen, head), length, _CLASSES, is_causal=False)


def vision_tower(vision: Mapping[str, Any], hidden: int) -> Section:
    """The weights of a language model's image encoder: frozen operators that text does not run
    through."""
    width = count_of(vision, "embed_dim", "hidden_size")
    middle = count_of(vision, "intermediate_size", default=int(vision.get("mlp_ratio", 4)) * width)
    gates = 3 if "out_hidden_size" in vision else 2
    block = 4 * width * width + gates * width * middle
    patch = count_of(vision, "patch_size", default=14) ** 2 * 3 * width
    merged = width * vision.get("spatial_merge_size", 1) ** 2
    merger = merged * merged + merged * hidden if "spatial_merge_size" in vision else width * hidden
    parameters = count_of(vision, "num_hidden_layers", "depth") * block + patch + merger
    section = Section("VisionTower", 1, is_checkpointed=False)
    section.operators.append(Operator("identity", "vision", (), 0, parameters=parameters))
    return section


BUILDERS: Final[dict[str, Callable[[Mapping[str, Any], int], Network]]] = {
    **dict.fromkeys(
        (
            *("bert", "roberta", "xlm-roberta", "mpnet", "distilbert", "electra", "albert"),
            *("deberta-v2", "modernbert"),
        ),
        _text_encoder,
    ),
    **dict.fromkeys(("t5", "mt5"), _t5),
    **dict.fromkeys(("bart", "whisper"), _bart),
    **dict.fromkeys(("vit", "dinov2"), _vision),
    **dict.fromkeys(("clip", "siglip", "clip_text_model"), _contrastive),
}
"""``model_type`` → what builds its network."""
