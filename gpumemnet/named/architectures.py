"""Turns a model's configuration into a network of blocks, as a function of the sequence length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpumemnet.errors import InvalidRequestError
from gpumemnet.named.decoders import STYLES, Decoder
from gpumemnet.named.diffusion import diffusion
from gpumemnet.named.encoders import BUILDERS, vision_tower
from gpumemnet.named.operators import Network, count_of


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
    builders = {**BUILDERS, "diffusers": diffusion}
    builder = builders.get(str(config.get("model_type")))
    if builder is not None:
        return builder(config, tokens)
    part = language_config(config)
    kind = part.get("model_type")
    if kind not in STYLES:
        known = ", ".join(sorted([*STYLES, *builders]))
        raise InvalidRequestError(
            f"its model_type {kind!r} is not known here: known are {known}; "
            "`gpumemnet trace FILE.py:FACTORY` takes any model",
            "model",
        )
    built = Decoder(part, tokens, is_joined=is_joined).network()
    if not isinstance(config.get("vision_config"), Mapping):
        return built
    tower = vision_tower(config["vision_config"], count_of(part, "hidden_size"))
    return replace(built, sections=(*built.sections[:-1], tower, built.sections[-1]))
