"""Turns a model's configuration into a network of blocks, as a function of the sequence length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gpumemnet.atomic_files import Document
from gpumemnet.errors import InvalidRequestError
from gpumemnet.named.blocks import Stack, joined, size_of, style_of, tables
from gpumemnet.named.operators import (
    BLOCK_INPUT,
    OUTER_INPUT,
    Config,
    Network,
    Section,
    count_of,
)

_SIZES: Final = ("elements", "parameters", "rows", "width", "heads")
_CLASSES: Final = 2
_DECODER: Final = "decoder"


def extracted_network(extracted: Document, size: int) -> Network:
    """The network of which the operators were extracted.

    Args:
        extracted: its sections; a list is a polynomial of the size, relative to the usual one.
        size: length of a side of its images in pixels, or of its sequences.
    """
    scale: float = size / extracted["size"]
    scale *= scale if extracted["unit"] == "pixels" else 1.0

    def at_size(number: int | list[int]) -> int:
        if isinstance(number, int):
            return number
        return max(round(sum(each * scale**power for power, each in enumerate(number))), 1)

    sections = []
    for name, count, is_checkpointed, width, operators in extracted["sections"]:
        section = Section(name, count, at_size(width), is_checkpointed=is_checkpointed)
        for kind, own_name, inputs, *sizes in operators:
            numbers = dict(zip(_SIZES, map(at_size, sizes), strict=False))
            section.add(kind, tuple(inputs), numbers.pop("elements"), own_name, **numbers)
        sections.append(section)
    head = sections[-1]
    head.add("loss", len(head.operators) - 1, head.operators[-1].elements)
    return Network(tuple(sections), is_causal=False)


def language_config(config: Config) -> Config:
    """The language model's part of a configuration; the whole of it for a model of text only."""
    part = config.get("text_config") or config.get("llm_config")
    if not isinstance(part, Mapping):
        return config
    return {"architectures": config.get("architectures"), **part}


def network(config: Config, tokens: int, *, is_joined: bool = False) -> Network:
    """Builds the network of a configuration.

    Args:
        config: a ``config.json`` of ``transformers``.
        tokens: positions of one sample.
        is_joined: whether queries, keys and values are one layer, as in ``litgpt``.

    Raises:
        InvalidRequestError: the family is not known, or a size is missing.
    """
    known, part = tables()["families"], language_config(config)
    kinds = [each.get("model_type") for each in (config, part)]
    kind = next((each for each in kinds if each in known), None)
    if kind is None:
        family = (
            f"its model_type {kinds[-1]!r} is not known here: known are {', '.join(sorted(known))}"
        )
        if "_class_name" in config:
            family = f"{config['_class_name']} of diffusers is known by the names of the catalogue"
        raise InvalidRequestError(
            f"{family}; `gpumemnet trace FILE.py:FACTORY` takes any model", "model"
        )
    return _Assembly(config, str(kind), tokens, is_joined).network()


class _Assembly:
    """Puts a network together: the sections of its family, of blocks or of steps.

    A step is a method that adds operators to ``section`` behind ``last``.
    """

    def __init__(self, config: Config, kind: str, tokens: int, is_joined: bool) -> None:
        self.config, self.kind, self.tokens, self.is_joined = config, kind, tokens, is_joined
        self.stacks: dict[str, Stack] = {}
        self.stack = self._stack("text")
        self.sections: list[Section] = []
        self.section, self.last = Section("", 0), BLOCK_INPUT
        self.width = self.outputs = self.tied = 0

    def network(self) -> Network:
        """The whole network."""
        style, given = self.stack.style, 0
        for name, part, steps in style.sections:
            self.stack = stack = self.stacks.get(part) or self._stack(part)
            self.stacks[part] = stack
            if steps == "blocks":
                self.sections += stack.sections(self._block_name(name))
                given = stack.tokens * stack.hidden
                continue
            self.section = Section(name, 1, given, is_checkpointed=False)
            self.last, self.width, given = BLOCK_INPUT, stack.hidden, 0
            for step in steps.split():
                own = getattr(self, f"_add_{step}", None)
                if own is None:  # of a block
                    self.last = getattr(stack, step)(self.section, self.last)
                else:
                    own()
            self.sections.append(self.section)
        vision = self.config.get("vision_config")
        if style.is_causal and isinstance(vision, Mapping):
            self.sections.insert(-1, vision_tower(vision, self.stack.hidden))
        return Network(tuple(self.sections), self.tied, style.is_causal, style.recomputes)

    def _stack(self, part: str) -> Stack:
        """The blocks of the ``text``, the ``vision`` or ``sound`` encoder, or of a ``decoder`` that
        reads an encoder."""
        config = {**language_config(self.config)}
        if part == "vision":
            config = {**(self.config.get("vision_config") or self.config)}
        if part == _DECODER:
            for name, keys in tables()["decoder_part"].items():
                config[name] = next(filter(None, map(config.get, keys.split())), config.get(name))
        style, config = style_of(self.kind, config)
        style = joined(style) if self.is_joined else style
        if part == "vision":
            side = count_of(config, "image_size", default=224) // _patch(config)
            return Stack(config, style, side * side + style.class_tokens)
        if part == "sound":
            return Stack(config, style, count_of(config, "max_source_positions"))
        longest = size_of(config, "positions") if style.is_cut else self.tokens
        read = next(iter(self.stacks.values())).tokens if part == _DECODER else 0
        return Stack(config, style, min(self.tokens, longest), read)

    def _block_name(self, name: str) -> str:
        if name != "DecoderLayer":
            return name
        architecture = (self.config.get("architectures") or ["Model"])[0]
        for ending in ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "Model"):
            architecture = architecture.removesuffix(ending)
        return f"{architecture}{name}"

    # ---- steps

    def _add(self, kind: str, elements: int, name: str = "", parameters: int = 0) -> None:
        """Adds an operator that reads the last one."""
        self.last = self.section.add(kind, self.last, elements, name, parameters=parameters)

    def _add_linear(self, name: str, width: int, rows: int = 1) -> None:
        sizes = (self.width, width)
        bias = self.stack.style.head_bias
        self.last = self.section.linear(self.last, rows, sizes, name, bias)

    def _embed(self, rows: int, name: str) -> None:
        """Adds an embedding to the sum of those that are there."""
        shape, parameters = self.stack.tokens * self.width, rows * self.width
        read = OUTER_INPUT if self.section.input_elements else BLOCK_INPUT
        found = self.section.add("embedding", read, shape, name, parameters=parameters)
        if found:
            found = self.section.add("add", (self.last, found), shape)
        self.last = found

    def _add_words(self) -> None:
        self.width = self._word_width
        self._embed(self._vocabulary, "embed_tokens")

    def _add_positions(self) -> None:
        rows = size_of(self.stack.config, "positions") + self.stack.style.extra_positions
        self._embed(rows, "positions")

    def _add_types(self) -> None:
        if self.stack.config.get("type_vocab_size"):
            self._embed(self.stack.config["type_vocab_size"], "types")

    def _add_distances(self) -> None:
        """Embeddings of relative positions (DeBERTa)."""
        rows = 2 * count_of(self.stack.config, "position_buckets", default=256)
        self._add("other", self.stack.tokens * self.width, "rel_embeddings", rows * self.width)

    def _add_norm(self) -> None:
        shape = self.stack.tokens * self.width
        self.last = self.stack.norm(self.section, self.last, shape, self.width)

    def _add_dropout(self) -> None:
        if self.stack.style.has_dropout:
            self._add("dropout", self.stack.tokens * self.width)

    def _add_sounds(self) -> None:
        """Two convolutions, the second of which halves the frames, and positions (Whisper)."""
        hidden, shape = self.stack.hidden, self.stack.tokens * self.stack.hidden
        bins = count_of(self.stack.config, "num_mel_bins", default=80)
        for channels, elements in ((bins, 2 * shape), (hidden, shape)):
            self._add("conv1d", elements, "conv", 3 * channels * hidden + hidden)
            self._add("gelu", elements)
        self._add("add", shape, "positions", shape)

    def _add_patches(self) -> None:
        """Patches of an image, and their positions (arXiv 2010.11929)."""
        hidden, tokens, style = self.stack.hidden, self.stack.tokens, self.stack.style
        weights = 3 * _patch(self.stack.config) ** 2 * hidden
        self._add("conv2d", (tokens - style.class_tokens) * hidden, "patch_embedding", weights)
        rows = tokens + style.class_tokens + style.extra_positions
        self._add("add", tokens * hidden, "positions", rows * hidden)

    def _add_project(self) -> None:
        """Narrow embeddings become as wide as the blocks, and what the head reads as the words."""
        width = self.stack.hidden if self.width != self.stack.hidden else self._word_width
        if width != self.width:
            self._add_linear("project", width, self.stack.tokens)
            self.width = width

    def _add_pooler(self) -> None:
        self._add_linear("pooler", self.width)

    def _add_projection(self) -> None:
        if self.config.get("projection_dim"):
            self._add_linear("projection", self.config["projection_dim"])

    def _add_classifier(self) -> None:
        if self.stack.config.get("num_labels"):
            self.outputs = self.stack.config["num_labels"]
            self._add_linear("classifier", self.outputs)

    def _add_lm_head(self) -> None:
        self._add_linear("lm_head", self._vocabulary, self.stack.tokens)
        self.outputs = self.stack.tokens * self._vocabulary
        if self.stack.config.get("tie_word_embeddings"):
            self.tied = self.width * self._vocabulary

    def _add_softcap(self) -> None:
        self._add("tanh", self.outputs)
        self._add("multiply", self.outputs)

    def _add_loss(self) -> None:
        self._add("loss", self.outputs or _CLASSES)

    @property
    def _vocabulary(self) -> int:
        return count_of(self.stack.config, "vocab_size")

    @property
    def _word_width(self) -> int:
        keys = ("embedding_size", "word_embed_proj_dim")
        return count_of(self.stack.config, *keys, default=self.stack.hidden)


def _patch(config: Config) -> int:
    return count_of(config, "patch_size", default=16)


def vision_tower(vision: Config, hidden: int) -> Section:
    """The weights of a language model's image encoder: frozen operators that text does not run
    through."""
    width = count_of(vision, "embed_dim", "hidden_size")
    middle = count_of(vision, "intermediate_size", default=int(vision.get("mlp_ratio", 4)) * width)
    gates = 3 if "out_hidden_size" in vision else 2
    block = 4 * width * width + gates * width * middle
    patch = _patch({"patch_size": 14, **vision}) ** 2 * 3 * width
    merged = width * vision.get("spatial_merge_size", 1) ** 2
    merger = merged * merged + merged * hidden if "spatial_merge_size" in vision else width * hidden
    parameters = count_of(vision, "num_hidden_layers", "depth") * block + patch + merger
    section = Section("VisionTower", 1, is_checkpointed=False)
    section.add("identity", (), 0, "vision", parameters=parameters)
    return section
