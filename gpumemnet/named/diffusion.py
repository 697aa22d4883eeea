"""Blocks of diffusion transformers: FLUX.1 and FLUX.2 as ``diffusers`` builds them.

A sample is one sequence of text and image positions.  The text has 512, an image of 512 pixels
1,024, one of 1,024 pixels 4,096.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gpumemnet.errors import InvalidRequestError
from gpumemnet.named.operators import BLOCK_INPUT, HEAD, Network, Section, count_of

TEXT_TOKENS: Final = 512
_TIME_CHANNELS: Final = 256
_STREAMS: Final = ("image", "text")


class _Flux:
    """Builds the network at a number of positions."""

    def __init__(self, config: Mapping[str, Any], tokens: int) -> None:
        self.config = config
        self.is_second = config["architectures"][0].startswith("Flux2")
        self.bias = not self.is_second
        self.hidden = count_of(config, "hidden_size")
        self.heads = count_of(config, "num_attention_heads")
        self.middle = int(config.get("mlp_ratio", 4) * self.hidden)
        text = min(TEXT_TOKENS, tokens - 1)
        self.rows = {"image": tokens - text, "text": text}
        self.tokens = tokens

    def network(self) -> Network:
        """The whole network."""
        double = self._double(count_of(self.config, "num_hidden_layers"))
        single = self._single(count_of(self.config, "num_single_layers"))
        sections = (self._embeddings(), double, single, self._head())
        return Network(sections, self.tokens, is_causal=False)

    def _linear(
        self, section: Section, source: int, rows: int, sizes: tuple[int, int], name: str
    ) -> int:
        return section.linear(source, rows, sizes, name, self.bias)

    def _embeddings(self) -> Section:
        config, hidden = self.config, self.hidden
        section = Section("Embeddings", 1, is_checkpointed=False)
        channels, text = config["in_channels"], config["joint_attention_dim"]
        image = self._linear(section, BLOCK_INPUT, self.rows["image"], (channels, hidden), "x")
        words = self._linear(section, BLOCK_INPUT, self.rows["text"], (text, hidden), "context")
        inputs = [_TIME_CHANNELS] * (1 + bool(config.get("guidance_embeds")))
        if not self.is_second:
            inputs.append(config["pooled_projection_dim"])
        for width in inputs:
            first = self._linear(section, BLOCK_INPUT, 1, (width, hidden), "embedder")
            self._linear(section, first, 1, (hidden, hidden), "embedder")
        if self.is_second:  # all blocks share one modulation
            for copies in (6, 6, 3):
                self._linear(section, BLOCK_INPUT, 1, (hidden, copies * hidden), "modulation")
        section.add("concatenate", (image, words), self.tokens * hidden)
        return section

    def _modulated(self, section: Section, source: int, rows: int) -> int:
        shape = rows * self.hidden
        normed = section.add("layer_norm", source, shape)
        return section.add("add", section.add("multiply", normed, shape), shape)

    def _double(self, count: int) -> Section:
        section = Section("FluxTransformerBlock", count, self.tokens * self.hidden)
        hidden, width = self.hidden, self.hidden // self.heads
        parts: dict[str, list[int]] = {"q": [], "k": [], "v": []}
        for stream in _STREAMS:
            rows = self.rows[stream]
            if not self.is_second:
                self._linear(section, BLOCK_INPUT, 1, (hidden, 6 * hidden), "norm")
            source = self._modulated(section, BLOCK_INPUT, rows)
            for part, found in parts.items():
                made = self._linear(section, source, rows, (hidden, hidden), f"{part}_proj")
                if part != "v":
                    made = section.add("rms_norm", made, rows * hidden, parameters=width)
                found.append(made)
        attended = self._attend(section, [tuple(found) for found in parts.values()])
        ends = [self._finish(section, attended, self.rows[stream]) for stream in _STREAMS]
        section.add("concatenate", tuple(ends), self.tokens * hidden)
        return section

    def _attend(self, section: Section, parts: list[tuple[int, ...]]) -> int:
        shape = self.tokens * self.hidden
        joined = [
            section.add("concatenate", part, shape) if len(part) > 1 else part[0] for part in parts
        ]
        turned = [section.add("rotary", part, shape) for part in joined[:2]]
        return section.add(
            *("attention", (*turned, joined[2]), shape, "attn"),
            heads=self.heads,
            width=self.hidden // self.heads,
        )

    def _finish(self, section: Section, attended: int, rows: int) -> int:
        """The output of attention and the feed-forward layer of one stream."""
        hidden, shape = self.hidden, rows * self.hidden
        out = self._linear(section, attended, rows, (hidden, hidden), "o_proj")
        total = section.add("add", section.add("multiply", out, shape), shape)
        source = self._modulated(section, total, rows)
        inner = self._widen(section, source, rows, self.middle * (1 + self.is_second), "up")
        down = self._linear(section, inner, rows, (self.middle, hidden), "down")
        return section.add("add", (total, section.add("multiply", down, shape)), shape)

    def _widen(self, section: Section, source: int, rows: int, wide: int, name: str) -> int:
        up = self._linear(section, source, rows, (self.hidden, wide), name)
        inner = section.add("silu" if self.is_second else "gelu", up, rows * self.middle)
        if self.is_second:
            inner = section.add("multiply", (inner, up), rows * self.middle)
        return inner

    def _single(self, count: int) -> Section:
        section = Section("FluxSingleTransformerBlock", count, self.tokens * self.hidden)
        hidden, rows, width = self.hidden, self.tokens, self.hidden // self.heads
        source = self._modulated(section, BLOCK_INPUT, rows)
        if self.is_second:
            joined = 3 * hidden + 2 * self.middle
            inner = self._widen(section, source, rows, joined, "qkv_mlp_proj")
            parts = [inner - 2] * 3  # the joined layer, before activation and product
        else:
            self._linear(section, BLOCK_INPUT, 1, (hidden, 3 * hidden), "norm")
            inner = self._widen(section, source, rows, self.middle, "proj_mlp")
            parts = [
                self._linear(section, source, rows, (hidden, hidden), f"{part}_proj")
                for part in "qkv"
            ]
        for at in (0, 1):
            parts[at] = section.add("rms_norm", parts[at], rows * hidden, parameters=width)
        attended = self._attend(section, [(part,) for part in parts])
        total = hidden + self.middle
        both = section.add("concatenate", (attended, inner), rows * total)
        out = self._linear(section, both, rows, (total, hidden), "out")
        gated = section.add("multiply", out, rows * hidden)
        section.add("add", (BLOCK_INPUT, gated), rows * hidden)
        return section

    def _head(self) -> Section:
        hidden, rows = self.hidden, self.rows["image"]
        section = Section(HEAD, 1, self.tokens * hidden, is_checkpointed=False)
        self._linear(section, BLOCK_INPUT, 1, (hidden, 2 * hidden), "norm_out")
        source = self._modulated(section, BLOCK_INPUT, rows)
        channels = self.config["in_channels"]
        out = self._linear(section, source, rows, (hidden, channels), "proj_out")
        section.add("loss", out, rows * channels)
        return section


def diffusion(config: Mapping[str, Any], tokens: int) -> Network:
    """The network of a diffusion transformer.

    Raises:
        InvalidRequestError: it is none that is known here.
    """
    name = str((config.get("architectures") or [""])[0])
    if not name.startswith("Flux"):
        raise InvalidRequestError(
            f"its class {name} is not known here: of diffusers FLUX.1 and FLUX.2 are; "
            "`gpumemnet trace FILE.py:FACTORY` takes any model",
            "model",
        )
    return _Flux(config, tokens).network()
