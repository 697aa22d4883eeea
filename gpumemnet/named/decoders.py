"""Blocks of decoders: language models that read earlier positions only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpumemnet.named.operators import BLOCK_INPUT, HEAD, OLD_GELU, Network, Section, count_of


@dataclass(frozen=True)
class Style:
    """What the decoder blocks of one family look like, where a configuration does not say it.

    Attributes:
        norm: ``rms_norm`` or ``layer_norm``.
        activation: kind of the activation.
        is_gated: whether the feed-forward layer multiplies two projections.
        qkv_bias, out_bias, mlp_bias, norm_bias, head_bias: which parts have a bias.
        norms: norms of a block; 1 for a block whose attention and feed-forward layer read the same
            norm, 4 for one that normalises their outputs too.
        is_parallel: whether attention and feed-forward layer read the same input.
        query_norm: none, ``head`` or ``all``: norms of queries and keys.
        is_fused: whether queries, keys and values, and gate and up, are one layer each.
        position_offset: rows of an embedding of positions beyond the longest sequence, if any.
        is_rotary, rotary_share: whether positions rotate queries and keys, and which share of them.
        norm_has_weight: whether norms have parameters.
        ties: whether the head shares the embedding when the configuration does not say so.
        softcaps: whether the logits are passed through a tanh.
        embedding_norm: whether a norm follows the embedding.
    """

    norm: str = "rms_norm"
    activation: str = "silu"
    is_gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = True
    head_bias: bool = False
    norms: int = 2
    is_parallel: bool = False
    query_norm: str = ""
    is_fused: bool = False
    position_offset: int | None = None
    is_rotary: bool = True
    rotary_share: float = 1.0
    norm_has_weight: bool = True
    ties: bool = False
    softcaps: bool = False
    embedding_norm: bool = False


_BIASED: Final[dict[str, Any]] = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_PLAIN: Final[dict[str, Any]] = {"norm": "layer_norm", "is_gated": False, "activation": "gelu"}
_GPT: Final[dict[str, Any]] = {**_PLAIN, **_BIASED, "is_rotary": False, "ties": True}
_OLD: Final[dict[str, Any]] = {"activation": OLD_GELU}

STYLES: Final[dict[str, Style]] = {
    **dict.fromkeys(
        ("llama", "mistral", "mixtral", "granite", "smollm3", "internlm2", "baichuan", "minicpm"),
        Style(),
    ),
    **dict.fromkeys(("deepseek", "orion", "llama4_text", "llama4", "deepseek_v2"), Style()),
    "deepseek_v3": Style(),
    **dict.fromkeys(("qwen2", "qwen", "qwen2_moe", "qwen2_vl", "qwen2_5_vl"), Style(qkv_bias=True)),
    **dict.fromkeys(("qwen3", "qwen3_moe"), Style(query_norm="head")),
    "gpt_oss": Style(qkv_bias=True, out_bias=True),
    "gemma": Style(activation="gelu", ties=True),
    "gemma2": Style(activation="gelu", ties=True, norms=4, softcaps=True),
    **dict.fromkeys(
        ("gemma3", "gemma3_text"), Style(activation="gelu", ties=True, norms=4, query_norm="head")
    ),
    "phi": Style(**{**_PLAIN, **_BIASED, **_OLD}, is_parallel=True, norms=1, head_bias=True),
    "phi3": Style(is_fused=True),
    "phimoe": Style(norm="layer_norm", qkv_bias=True, out_bias=True, head_bias=True),
    "falcon": Style(**_PLAIN, is_parallel=True, norms=1, is_fused=True, ties=True),
    "gpt_neox": Style(**_PLAIN, **_BIASED, is_parallel=True, is_fused=True, rotary_share=0.25),
    "stablelm": Style(norm="layer_norm", rotary_share=0.25),
    "gpt2": Style(**{**_GPT, **_OLD}, is_fused=True, position_offset=0),
    "gptj": Style(**{**_PLAIN, **_OLD}, mlp_bias=True, is_parallel=True, norms=1, head_bias=True),
    "gpt_neo": Style(**{**_GPT, **_OLD, "qkv_bias": False}, position_offset=0),
    "opt": Style(**{**_GPT, "activation": "relu"}, position_offset=2),
    "bloom": Style(**_GPT, is_fused=True, embedding_norm=True),
    "mpt": Style(**_PLAIN, is_rotary=False, ties=True, is_fused=True, norm_bias=False),
    "olmo": Style(norm="layer_norm", norm_has_weight=False),
    **dict.fromkeys(("olmo2", "olmo3"), Style(query_norm="all")),
    "olmoe": Style(query_norm="all"),
    **dict.fromkeys(
        ("cohere", "cohere2"),
        Style(norm="layer_norm", norm_bias=False, is_parallel=True, norms=1, ties=True),
    ),
    "starcoder2": Style(**_PLAIN, **_BIASED),
    "gpt_bigcode": Style(**_GPT, is_fused=True, position_offset=0),
    "chatglm": Style(qkv_bias=True, is_fused=True),
    "glm": Style(qkv_bias=True),
    "glm4": Style(norms=4),
    "internlm": Style(qkv_bias=True, out_bias=True),
}
"""``model_type`` of a decoder → its style."""


class Decoder:
    """Builds the network of a decoder: a language model that reads earlier positions only."""

    def __init__(self, config: Mapping[str, Any], tokens: int, *, is_joined: bool = False) -> None:
        self.config, self.tokens, self.is_joined = config, tokens, is_joined
        self.kind = str(config["model_type"])
        self.style = STYLES[self.kind]
        self.hidden = count_of(config, "hidden_size", "n_embd", "d_model")
        self.blocks = count_of(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
        self.heads = count_of(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
        self.groups = self._groups()
        self.head_width = config.get("head_dim") or self.hidden // self.heads
        self.middle = count_of(
            config, "intermediate_size", "n_inner", "ffn_dim", default=4 * self.hidden
        )
        self.vocabulary = count_of(config, "vocab_size")
        stated = config.get("tie_word_embeddings")
        self.is_tied = self.style.ties if stated is None else bool(stated)

    def _groups(self) -> int:
        """Heads of keys and values."""
        if self.config.get("multi_query") and not self.config.get("new_decoder_architecture"):
            return 1
        return count_of(
            self.config,
            *("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
            default=self.heads,
        )

    def network(self) -> Network:
        """The whole network."""
        dense, sparse = self._block_counts()
        sections = [self._embeddings()]
        if dense:
            sections.append(self._block(dense, is_sparse=False))
        if sparse:
            sections.append(self._block(sparse, is_sparse=True))
        sections.append(self._head())
        width = self.config.get("word_embed_proj_dim") or self.hidden
        tied = width * self.vocabulary if self.is_tied else 0
        return Network(tuple(sections), self.tokens, self.vocabulary, tied)

    def _block_counts(self) -> tuple[int, int]:
        """Blocks with one feed-forward layer, and blocks with experts."""
        experts = self._experts()
        if not experts:
            return self.blocks, 0
        step = self.config.get("interleave_moe_layer_step") or 1
        dense = self.config.get("first_k_dense_replace", 0) or self.blocks - self.blocks // step
        return dense, self.blocks - dense

    def _experts(self) -> int:
        return count_of(
            self.config,
            *("num_local_experts", "num_experts", "n_routed_experts"),
            default=0,
        )

    def _embeddings(self) -> Section:
        section = Section("Embeddings", 1, is_checkpointed=False)
        width = self.config.get("word_embed_proj_dim") or self.hidden
        last = section.add(
            "embedding",
            BLOCK_INPUT,
            self.tokens * width,
            "embed_tokens",
            parameters=self.vocabulary * width,
        )
        if self.style.position_offset is not None:
            length = count_of(self.config, "max_position_embeddings", "n_positions", "n_ctx")
            length += self.style.position_offset
            shape = self.tokens * self.hidden
            positions = section.add(
                "embedding", BLOCK_INPUT, shape, "positions", parameters=length * self.hidden
            )
            if width != self.hidden:
                last = section.linear(last, self.tokens, (width, self.hidden), "project_in")
            last = section.add("add", (last, positions), shape)
        if self.style.embedding_norm:
            self._norm(section, last, "embedding_norm")
        return section

    def _norm(
        self, section: Section, source: int, name: str, elements: int = 0, width: int = 0
    ) -> int:
        width = width or self.hidden
        copies = 2 if self.style.norm == "layer_norm" and self.style.norm_bias else 1
        parameters = copies * width if self.style.norm_has_weight else 0
        elements = elements or self.tokens * self.hidden
        return section.add(self.style.norm, source, elements, name, parameters=parameters)

    def _block(self, count: int, *, is_sparse: bool) -> Section:
        section = Section(self._block_name(), count, self.tokens * self.hidden)
        style, shape = self.style, self.tokens * self.hidden
        # OLMo 2 normalises what attention and the feed-forward layer give, and not what they read.
        is_behind = self.kind in ("olmo2", "olmo3")
        source = BLOCK_INPUT if is_behind else self._norm(section, BLOCK_INPUT, "input_layernorm")
        attended = self._attention(section, source)
        if is_behind or style.norms == 4:
            attended = self._norm(section, attended, "post_attention_layernorm")
        if style.is_parallel:
            if style.norms == 2 or self.config.get("new_decoder_architecture"):
                source = self._norm(section, BLOCK_INPUT, "ln_mlp")
            forward = self._feed_forward(section, source, is_sparse)
            total = section.add("add", (forward, attended), shape)
            section.add("add", (total, BLOCK_INPUT), shape)
            return section
        middle = section.add("add", (BLOCK_INPUT, attended), shape)
        source = middle if is_behind else self._norm(section, middle, "pre_feedforward_layernorm")
        forward = self._feed_forward(section, source, is_sparse)
        if is_behind or style.norms == 4:
            forward = self._norm(section, forward, "post_feedforward_layernorm")
        section.add("add", (middle, forward), shape)
        return section

    def _block_name(self) -> str:
        architecture = (self.config.get("architectures") or ["Model"])[0]
        for ending in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model"):
            architecture = architecture.removesuffix(ending)
        return f"{architecture}DecoderLayer"

    def _attention(self, section: Section, source: int) -> int:
        config, style, tokens = self.config, self.style, self.tokens
        if config.get("kv_lora_rank"):
            return self._latent_attention(section, source)
        bias = style.qkv_bias or bool(config.get("attention_bias") or config.get("qkv_bias"))
        bias = bias or bool(config.get("add_qkv_bias") or config.get("use_qkv_bias"))
        bias = bias or (self.kind == "falcon" and bool(config.get("bias")))
        if config.get("use_bias") is not None and self.kind == "starcoder2":
            bias = bool(config["use_bias"])
        wide, narrow = self.heads * self.head_width, self.groups * self.head_width
        if style.is_fused or self.is_joined:
            joined = section.linear(
                source, tokens, (self.hidden, wide + 2 * narrow), "qkv_proj", bias
            )
            queries = keys = values = joined
        else:
            widths = {"": (0, 0), "head": (self.head_width,) * 2, "all": (wide, narrow)}
            normed = widths[style.query_norm]
            queries = section.linear(source, tokens, (self.hidden, wide), "q_proj", bias)
            if style.query_norm:
                queries = self._norm(section, queries, "q_norm", tokens * wide, normed[0])
            keys = section.linear(source, tokens, (self.hidden, narrow), "k_proj", bias)
            if style.query_norm:
                keys = self._norm(section, keys, "k_norm", tokens * narrow, normed[1])
            values = section.linear(source, tokens, (self.hidden, narrow), "v_proj", bias)
        if style.is_rotary:
            queries, keys = self._rotate(section, (queries, keys), (wide, narrow))
        attended = section.add(
            *("attention", (queries, keys, values), tokens * wide, "self_attn"),
            heads=self.heads,
            width=self.head_width,
            parameters=self.heads if self.kind == "gpt_oss" else 0,
        )
        out_bias = style.out_bias or bool(config.get("attention_bias"))
        out_bias = out_bias and self.kind not in ("qwen2_moe",)
        if self.kind == "falcon":
            out_bias = bool(config.get("bias"))
        if self.kind == "gpt_neo":
            out_bias = True
        return section.linear(attended, tokens, (wide, self.hidden), "o_proj", out_bias)

    def _rotate(
        self, section: Section, sources: tuple[int, int], widths: tuple[int, int]
    ) -> list[int]:
        """Rotary positions of queries and keys, of all of a head or the first part of it."""
        stated = self.config.get("rope_parameters") or {}
        share = self.config.get("partial_rotary_factor") or self.config.get("rotary_pct")
        share = share or stated.get("partial_rotary_factor") or self.style.rotary_share
        rotated = int(self.head_width * share)
        found = [
            section.add("rotary", source, self.tokens * width // self.head_width * rotated)
            for source, width in zip(sources, widths, strict=True)
        ]
        if rotated == self.head_width:
            return found
        return [
            section.add("concatenate", (part, source), self.tokens * width)
            for part, source, width in zip(found, sources, widths, strict=True)
        ]

    def _latent_attention(self, section: Section, source: int) -> int:
        """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""
        config, tokens = self.config, self.tokens
        plain, rotated = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        width, value_width = plain + rotated, config["v_head_dim"]
        rank, query_rank = config["kv_lora_rank"], config.get("q_lora_rank")
        if query_rank:
            low = section.linear(source, tokens, (self.hidden, query_rank), "q_a_proj")
            low = self._norm(section, low, "q_a_layernorm", tokens * query_rank, query_rank)
            queries = section.linear(low, tokens, (query_rank, self.heads * width), "q_b_proj")
        else:
            queries = section.linear(source, tokens, (self.hidden, self.heads * width), "q_proj")
        low = section.linear(source, tokens, (self.hidden, rank + rotated), "kv_a_proj_with_mqa")
        low = self._norm(section, low, "kv_a_layernorm", tokens * rank, rank)
        pairs = section.linear(low, tokens, (rank, self.heads * (plain + value_width)), "kv_b_proj")
        wide = tokens * self.heads * width
        queries = section.add("concatenate", queries, wide)
        keys = section.add("concatenate", pairs, wide)
        shape = tokens * self.heads * value_width
        attended = section.add(
            "attention", (queries, keys, pairs), shape, "self_attn", heads=self.heads, width=width
        )
        return section.linear(attended, tokens, (self.heads * value_width, self.hidden), "o_proj")

    def _feed_forward(self, section: Section, source: int, is_sparse: bool) -> int:
        config, tokens = self.config, self.tokens
        if not is_sparse:
            middle = config.get("intermediate_size_mlp") or self.middle
            return self._layers(section, source, tokens, middle)
        experts = self._experts()
        chosen = count_of(config, "num_experts_per_tok", "moe_top_k", default=1)
        middle = config.get("moe_intermediate_size") or self.middle
        section.linear(source, tokens, (self.hidden, experts), "router", self.kind == "gpt_oss")
        rows = tokens * chosen
        gathered = section.add("other", source, rows * self.hidden)
        found = self._layers(section, gathered, rows, middle, experts)
        weighed = section.add("multiply", found, rows * self.hidden)
        total = section.add("add", weighed, tokens * self.hidden)
        shared = config.get("shared_expert_intermediate_size") or middle * (
            config.get("n_shared_experts") or (1 if self.kind.startswith("llama4") else 0)
        )
        if shared:
            other = self._layers(section, source, tokens, shared)
            if self.kind == "qwen2_moe":
                section.linear(source, tokens, (self.hidden, 1), "shared_expert_gate")
            total = section.add("add", (total, other), tokens * self.hidden)
        return total

    def _layers(
        self, section: Section, source: int, rows: int, middle: int, copies: int = 1
    ) -> int:
        """The feed-forward layer, or those of the experts."""
        style = self.style
        bias = style.mlp_bias or bool(self.config.get("mlp_bias"))
        bias = bias or (self.kind == "falcon" and bool(self.config.get("bias")))
        bias = bias or (self.kind == "gpt_oss" and copies > 1)
        gate = "joined" if style.is_fused or copies > 1 else "split"
        activation = style.activation
        return section.feed_forward(
            *(source, rows, (self.hidden, middle)),
            "gelu" if self.is_joined and activation == OLD_GELU else activation,
            gate=gate if style.is_gated else "",
            bias=bias,
            copies=copies,
        )

    def _head(self) -> Section:
        tokens, hidden = self.tokens, self.hidden
        section = Section(HEAD, 1, tokens * hidden, is_checkpointed=False)
        last = self._norm(section, BLOCK_INPUT, "norm")
        width = self.config.get("word_embed_proj_dim") or hidden
        if width != hidden:
            last = section.linear(last, tokens, (hidden, width), "project_out")
        bias = self.style.head_bias
        logits = section.linear(last, tokens, (width, self.vocabulary), "lm_head", bias)
        if self.style.softcaps:
            logits = section.add("tanh", logits, tokens * self.vocabulary)
            logits = section.add("multiply", logits, tokens * self.vocabulary)
        section.add("loss", logits, tokens * self.vocabulary)
        return section
