"""Turns a model's configuration into a network of blocks, as a function of the sequence length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.named.decoders import STYLES, Decoder
from gpumemnet.named.encoders import BUILDERS, vision_tower
from gpumemnet.named.operators import Network, Section, count_of


def extracted_network(extracted: Mapping[str, Any], size: int) -> Network:
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
    outputs = head.operators[-1].elements
    head.add("loss", len(head.operators) - 1, outputs)
    return Network(tuple(sections), 1, outputs, is_causal=False)


_SIZES: Final = ("elements", "parameters", "rows", "width", "heads")


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a configuration; the whole of it for a model of text only."""
    part = config.get("text_config") or config.get("llm_config")
    if not isinstance(part, Mapping):
        return config
    return {"architectures": config.get("architectures"), **part}


def network(config: Mapping[str, Any], tokens: int, *, is_joined: bool = False) -> Network:
    """Builds the network of a configuration.

    Args:
        config: a ``config.json`` of ``transformers``.
        tokens: positions of one sample.
        is_joined: whether queries, keys and values are one layer, as in ``litgpt``.

    Raises:
        InvalidRequestError: the family is not known, or a size is missing.
    """
    builder = BUILDERS.get(str(config.get("model_type")))
    if builder is not None:
        return builder(config, tokens)
    part = language_config(config)
    kind = part.get("model_type")
    if kind not in STYLES:
        known = ", ".join(sorted([*STYLES, *BUILDERS]))
        family = f"its model_type {kind!r} is not known here: known are {known}"
        if "_class_name" in config:
            family = f"{config['_class_name']} of diffusers is known by the names of the catalogue"
        raise InvalidRequestError(
            f"{family}; `gpumemnet trace FILE.py:FACTORY` takes any model", "model"
        )
    built = Decoder(part, tokens, is_joined=is_joined).network()
    if not isinstance(config.get("vision_config"), Mapping):
        return built
    tower = vision_tower(config["vision_config"], count_of(part, "hidden_size"))
    return replace(built, sections=(*built.sections[:-1], tower, built.sections[-1]))
