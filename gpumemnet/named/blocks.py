"""Blocks of attention and a feed-forward layer, of decoders, encoders and vision transformers.

``architectures.json`` says for each family what its blocks look like, where a configuration does not
say it, and which values of a configuration change that; what configurations and classes call sizes
(``sizes``, ``class_keys``) and layers (``layer_names``, ``litgpt_targets``); the class of
``transformers`` that is trained by the table that lists a model (``tasks``: the first counts); and
the shapes that a model is called with (``inputs``).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from gpumemnet.atomic_files import Document, shipped_json
from gpumemnet.named.operators import BLOCK_INPUT, OLD_GELU, OUTER_INPUT, Config, Section, count_of

EAGER: Final = "eager_attention"
"""Name of an attention in single operations, whatever kernel PyTorch would choose."""


@dataclass(frozen=True, slots=True)
class Style:
    """What the blocks of one family look like.

    Attributes:
        sections: of the network: name, part of the model, and ``blocks`` or steps.
        norm, norm_vectors: kind of the norms, and how many parameters they have for each feature.
        norms: where they stand: ``before`` attention and feed-forward layer, behind their
            ``outputs``, ``both``, or behind the ``sums`` with their input.
        parallel_norms: norms of blocks whose attention and feed-forward layer read the same input;
            0 for those that run one after the other.
        activation: of the feed-forward layer; :data:`~gpumemnet.named.operators.OLD_GELU` runs in
            single operations.
        gate: ``split`` or ``joined`` where the activation is multiplied with a second layer, of its
            own or one with the first.
        qkv_bias, key_bias, out_bias, mlp_bias, head_bias: which parts have a bias; that of keys also
            needs ``qkv_bias``.
        query_norm: none, ``head`` or ``all``: norms of queries and keys.
        is_joined: whether queries, keys and values are one layer.
        groups: heads of keys and values; 0 where the configuration says it.
        rotary: share of queries and keys that positions rotate.
        is_causal: whether attention reads earlier positions only.
        is_eager: whether attention is computed in single operations.
        has_dropout, scales: whether dropout or a layer scale follows attention and feed-forward
            layer.
        shares_blocks: whether all blocks have the weights of the first.
        extra_positions: rows of the embedding of positions beyond the longest sequence.
        class_tokens: positions of an image beside its patches.
        recomputes: whether ``transformers`` can recompute the blocks.
        is_cut: whether longer sequences are cut to the longest one.
    """

    sections: tuple[tuple[str, str, str], ...]
    norm: str = "rms_norm"
    norm_vectors: int = 1
    norms: str = "before"
    parallel_norms: int = 0
    activation: str = "silu"
    gate: str = "split"
    qkv_bias: bool = False
    key_bias: bool = True
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    query_norm: str = ""
    is_joined: bool = False
    groups: int = 0
    rotary: float = 1.0
    is_causal: bool = True
    is_eager: bool = False
    has_dropout: bool = False
    scales: bool = False
    shares_blocks: bool = False
    extra_positions: int = 0
    class_tokens: int = 0
    recomputes: bool = True
    is_cut: bool = False


@cache
def tables() -> Document:
    """``architectures.json``."""
    document: Document = shipped_json("named/architectures.json")
    for part in ("families", "class_keys", "inputs"):
        document[part] = {n: own for names, own in document[part].items() for n in names.split()}
    return document


def effects(rules: Iterable[tuple[str, Mapping[str, Any]]], values: Mapping[str, Any]) -> Document:
    """The effects of the rules of which the values match all patterns, such as
    ``deepspeed*=*offload*``, in lower case; later rules override earlier ones."""
    stated = [f"{name}={value}".lower() for name, value in values.items() if value is not None]
    found: Document = {}
    for patterns, effect in rules:
        if all(fnmatch.filter(stated, pattern) for pattern in patterns.split()):
            found |= effect
    return found


def family(name: str) -> Document:
    """What is said of a ``model_type``, and of the family that it is like."""
    own = {**tables()["bases"], **tables()["families"]}[name]
    if "like" not in own:
        return {"defaults": {}, "rules": [], **own}
    base = family(own["like"])
    both = {
        "defaults": base["defaults"] | own.get("defaults", {}),
        "rules": [*base["rules"], *own.get("rules", ())],
    }
    return {**base, **own, **both}


def style_of(name: str, config: Config) -> tuple[Style, Document]:
    """The style of a ``model_type``, and the configuration with the family's defaults."""
    values = family(name)
    stated = {key: value for key, value in config.items() if value is not None}
    settings = values.pop("defaults") | stated
    values |= effects(values.pop("rules"), settings)
    values.pop("like", None)
    return Style(**values), settings


def size_of(config: Config, name: str, default: int | None = None) -> int:
    """A size, under whatever key the configuration states it."""
    return count_of(config, *tables()["sizes"][name].split(), default=default)


class Stack:
    """Equal blocks of one part of a model.

    Args:
        config: of this part.
        style: of its blocks.
        tokens: positions of one sample.
        outer_tokens: positions that a cross-attention reads; 0 without one.
    """

    def __init__(self, config: Config, style: Style, tokens: int, outer_tokens: int = 0) -> None:
        self.config, self.style = config, style
        self.tokens, self.outer_tokens = tokens, outer_tokens
        self.hidden = size_of(config, "hidden")
        self.heads = size_of(config, "heads")
        self.groups = style.groups or size_of(config, "groups", self.heads)
        self.head_width = size_of(config, "head_width", self.hidden // self.heads)
        ratio = config.get("mlp_ratio") or 4
        self.middle = size_of(config, "middle", int(ratio * self.hidden))
        self.experts = size_of(config, "experts", 0)

    def sections(self, name: str) -> list[Section]:
        """All its blocks: those with one feed-forward layer, then those with experts."""
        config, blocks = self.config, size_of(self.config, "blocks")
        dense = blocks
        if self.experts:
            step = config.get("interleave_moe_layer_step") or 1
            dense = config.get("first_k_dense_replace", 0) or blocks - blocks // step
        counts = ((dense, 0), (blocks - dense, self.experts))
        found = [self._block(name, count, experts) for count, experts in counts if count]
        if self.style.shares_blocks:
            first = replace(found[0], count=1)
            plain = [each._replace(parameters=0) for each in first.operators]
            found = [first, replace(first, count=blocks - 1, operators=plain)]
        return found

    def _block(self, name: str, count: int, experts: int) -> Section:
        section, style = Section(name, count, self.tokens * self.hidden), self.style

        def forward(source: int) -> int:
            return self._mixture(section, source) if experts else self.feed_forward(section, source)

        if style.parallel_norms:
            source = read = self.norm(section, BLOCK_INPUT)
            attended = self.attention(section, source)
            if style.parallel_norms == 2:
                read = self.norm(section, BLOCK_INPUT)
            total = self._sum(section, forward(read), attended)
            self._sum(section, total, BLOCK_INPUT)
            return section
        last = self._residual(section, BLOCK_INPUT, lambda source: self.attention(section, source))
        if self.outer_tokens:
            last = self._residual(section, last, lambda source: self._crossing(section, source))
        self._residual(section, last, forward)
        return section

    def _sum(self, section: Section, *sources: int) -> int:
        return section.add("add", sources, self.tokens * self.hidden)

    def _residual(self, section: Section, source: int, build: Callable[[int], int]) -> int:
        style, shape = self.style, self.tokens * self.hidden
        is_before = style.norms in ("before", "both")
        inner = build(self.norm(section, source) if is_before else source)
        if style.norms in ("outputs", "both"):
            inner = self.norm(section, inner)
        if style.has_dropout:
            inner = section.add("dropout", inner, shape)
        if style.scales:
            inner = section.add("multiply", inner, shape, "layer_scale", parameters=self.hidden)
        total = self._sum(section, source, inner)
        return self.norm(section, total) if style.norms == "sums" else total

    def norm(self, section: Section, source: int, elements: int = 0, width: int = 0) -> int:
        """Adds a norm: of the hidden state, or of so many elements of one sample."""
        parameters = self.style.norm_vectors * (width or self.hidden)
        shape = elements or self.tokens * self.hidden
        return section.add(self.style.norm, source, shape, "norm", parameters=parameters)

    # ---- attention

    def attention(self, section: Section, source: int) -> int:
        """Adds the attention of a block to itself."""
        if self.config.get("kv_lora_rank"):
            return self._latent_attention(section, source)
        style, tokens = self.style, self.tokens
        widths = self.heads * self.head_width, self.groups * self.head_width
        if style.is_joined:
            sizes = (self.hidden, widths[0] + 2 * widths[1])
            joined = section.linear(source, tokens, sizes, "qkv_proj", style.qkv_bias)
            pair, values = [joined, joined], joined
        else:
            pair, values = self._projections(section, source, source, tokens)
        if style.rotary:
            pair = self._rotated(section, pair, widths)
        return self._attended(section, (*pair, values), self.head_width, self.head_width)

    def _crossing(self, section: Section, source: int) -> int:
        """Queries of ``source``, keys and values of the outer tensor."""
        pair, values = self._projections(section, source, OUTER_INPUT, self.outer_tokens)
        return self._attended(section, (*pair, values), self.head_width, self.head_width)

    def _projections(
        self, section: Section, source: int, other: int, rows: int
    ) -> tuple[list[int], int]:
        """Queries and keys, with their norms, and values."""
        style, found = self.style, []
        has_key_bias = style.qkv_bias and style.key_bias
        for name, read, count, heads, bias in (
            ("q_proj", source, self.tokens, self.heads, style.qkv_bias),
            ("k_proj", other, rows, self.groups, has_key_bias),
            ("v_proj", other, rows, self.groups, style.qkv_bias),
        ):
            width = heads * self.head_width
            last = section.linear(read, count, (self.hidden, width), name, bias)
            if style.query_norm and name != "v_proj":
                normed = self.head_width if style.query_norm == "head" else width
                last = self.norm(section, last, count * width, normed)
            found.append(last)
        return found[:2], found[2]

    def _attended(
        self, section: Section, inputs: tuple[int, ...], width: int, value_width: int
    ) -> int:
        wide = self.heads * value_width
        name = EAGER if self.style.is_eager else "self_attn"
        sizes = {"rows": self.tokens, "heads": self.heads, "width": width}
        attended = section.add("attention", inputs, self.tokens * wide, name, **sizes)
        out = (wide, self.hidden)
        return section.linear(attended, self.tokens, out, "o_proj", self.style.out_bias)

    def _rotated(self, section: Section, sources: list[int], widths: tuple[int, int]) -> list[int]:
        """Rotary positions of queries and keys, of all of a head or the first part of it."""
        config = self.config
        share = config.get("partial_rotary_factor") or config.get("rotary_pct")
        share = share or config.get("rope_parameters", {}).get("partial_rotary_factor")
        rotated = int(self.head_width * (share or self.style.rotary))
        shapes = [self.tokens * width for width in widths]
        parts = [
            section.add("rotary", source, shape // self.head_width * rotated)
            for source, shape in zip(sources, shapes, strict=True)
        ]
        if rotated == self.head_width:
            return parts
        pairs = zip(parts, sources, strict=True)
        return [
            section.add("concatenate", pair, shape)
            for pair, shape in zip(pairs, shapes, strict=True)
        ]

    def _latent_attention(self, section: Section, source: int) -> int:
        """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
        config, tokens = self.config, self.tokens
        plain, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        width, value_width = plain + rotated, config["v_head_dim"]
        rank, query_rank = config["kv_lora_rank"], config.get("q_lora_rank")
        low, wide, name = source, self.hidden, "q_proj"
        if query_rank:
            low = section.linear(source, tokens, (wide, query_rank), "q_a_proj")
            low = self.norm(section, low, tokens * query_rank, query_rank)
            wide, name = query_rank, "q_b_proj"
        queries = section.linear(low, tokens, (wide, self.heads * width), name)
        low = section.linear(source, tokens, (self.hidden, rank + rotated), "kv_a_proj_with_mqa")
        low = self.norm(section, low, tokens * rank, rank)
        pairs = section.linear(low, tokens, (rank, self.heads * (plain + value_width)), "kv_b_proj")
        inner = tokens * self.heads * width
        queries, keys = (section.add("concatenate", each, inner) for each in (queries, pairs))
        return self._attended(section, (queries, keys, pairs), width, value_width)

    # ---- feed-forward layers

    def feed_forward(self, section: Section, source: int) -> int:
        """Adds the feed-forward layer."""
        middle = self.config.get("intermediate_size_mlp") or self.middle
        return self._layers(section, source, self.tokens, middle)

    def _mixture(self, section: Section, source: int) -> int:
        """A router, the experts that it chooses, and those that all tokens pass."""
        config, tokens, hidden = self.config, self.tokens, self.hidden
        middle = config.get("moe_intermediate_size") or self.middle
        sizes = (hidden, self.experts)
        section.linear(source, tokens, sizes, "router", self.style.mlp_bias)
        rows = tokens * size_of(config, "chosen_experts", 1)
        gathered = section.add("other", source, rows * hidden)
        found = self._layers(section, gathered, rows, middle, self.experts)
        weighed = section.add("multiply", found, rows * hidden)
        total = self._sum(section, weighed)
        shared = config.get("n_shared_experts", 0) * middle
        shared = config.get("shared_expert_intermediate_size") or shared
        if not shared:
            return total
        return self._sum(section, total, self._layers(section, source, tokens, shared))

    def _layers(
        self, section: Section, source: int, rows: int, middle: int, copies: int = 1
    ) -> int:
        """A layer that widens, an activation, and a layer that narrows; or those of the experts."""
        style, shape, wide = self.style, rows * middle, (self.hidden, middle)
        gate = "joined" if style.gate and copies > 1 else style.gate
        first = (self.hidden, 2 * middle) if gate == "joined" else wide
        names = {"joined": "gate_up_proj", "split": "gate_proj", "": "up_proj"}
        up = section.linear(source, rows, first, names[gate], style.mlp_bias, copies)
        inner = self._activated(section, up, shape)
        if gate == "split":
            up = section.linear(source, rows, wide, "up_proj", style.mlp_bias)
        if gate:
            inner = section.add("multiply", (inner, up), shape)
        return section.linear(inner, rows, wide[::-1], "down_proj", style.mlp_bias, copies)

    def _activated(self, section: Section, source: int, elements: int) -> int:
        kind = self.style.activation
        if kind != OLD_GELU:
            return section.add(kind, source, elements)
        bent = section.add("tanh", section.add("activation", source, elements), elements)
        factors = section.add("other", source, elements), section.add("add", bent, elements)
        return section.add("multiply", factors, elements)


def joined(style: Style) -> Style:
    """The style as ``litgpt`` builds it: queries, keys and values are one layer."""
    activation = "gelu" if style.activation == OLD_GELU else style.activation
    return replace(style, is_joined=True, activation=activation)
