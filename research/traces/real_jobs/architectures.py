"""Draws real architectures: networks of timm and torchvision by name, configurations of
transformers of random sizes, and others.

Every draw reads nothing but its random generator and the list of names beside this file, so that it
is the same on every machine.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from research.published_tables.architecture_families import architecture_family
from research.published_tables.timm_models import TIMM_VERSION

Draw = np.random.Generator

_TIMM_NAMES: Final = Path(__file__).with_name("timm_names.csv")
"""The models of ``published_timm_a100.csv``, the side of their images, and whether timm says that
they take others."""
_ONE_SIZE: Final = ("bot", "halo", "lambda", "bat_", "efficientnet_x", "efficientnet_h")
"""Parts of names of networks that take one image size, although timm does not say so: their
attention is made for it."""
_NAMES: Final = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
_SIZES_VARY: Final = frozenset(_NAMES["any_size"])
"""Families of convolutional networks, which take images of any size."""
_TORCHVISION: Final = _NAMES["torchvision"]
_IMAGE_SIZES: Final = (96, 128, 160, 192, 224, 224, 224, 224, 256, 288, 320, 384)
_CLASSES: Final = (10, 100, 1000, 1000, 1000)
_LENGTHS: Final = (32, 64, 128, 128, 256, 256, 512, 512, 1024, 1024, 2048)
_VOCABULARIES: Final = (30_522, 32_000, 32_128, 50_257, 50_265, 50_272, 50_304, 128_256)
_HEAD_WIDTHS: Final = (32, 64, 64, 64, 80, 96, 128)
_LARGEST_WIDTH: Final = 2_560
_LARGEST_BODY: Final = 1.2e9
"""Parameters of a transformer's blocks; larger ones train on several GPUs, or not in full."""


@cache
def timm_names() -> tuple[tuple[str, int, bool], ...]:
    """Name of each model, the side of its images, and whether it takes others."""
    with _TIMM_NAMES.open(encoding="utf-8", newline="") as file:
        rows = [
            (row["model"], int(row["image_size"]), row["takes_other_sizes"] == "yes")
            for row in csv.DictReader(file)
        ]
    return tuple((name, size, free and _takes_any_size(name)) for name, size, free in rows)


def _takes_any_size(name: str) -> bool:
    return architecture_family(name) in _SIZES_VARY and not any(part in name for part in _ONE_SIZE)


def draw_architecture(draw: Draw) -> dict[str, Any]:
    """A document of :mod:`research.traces.real_jobs.networks`."""
    shares = np.array([share for share, _ in _SOURCES])
    return _SOURCES[draw.choice(len(_SOURCES), p=shares / shares.sum())][1](draw)


def _pick(draw: Draw, values: Sequence[Any]) -> Any:
    return values[int(draw.integers(len(values)))]


def _between(draw: Draw, smallest: float, largest: float) -> float:
    """A number whose logarithm is uniform."""
    return float(np.exp(draw.uniform(np.log(smallest), np.log(largest))))


def _timm(draw: Draw) -> dict[str, Any]:
    """A family by the square root of its size, so that small ones occur too, and one of its
    models."""
    families: dict[str, list[tuple[str, int, bool]]] = {}
    for entry in timm_names():
        families.setdefault(architecture_family(entry[0]), []).append(entry)
    weights = np.sqrt([len(members) for members in families.values()])
    members = list(families.values())[draw.choice(len(families), p=weights / weights.sum())]
    name, size, takes_others = _pick(draw, members)
    return {
        "library": "timm",
        "version": TIMM_VERSION,
        "model": name,
        "image_size": _pick(draw, _IMAGE_SIZES) if takes_others else size,
        "classes": _pick(draw, _CLASSES),
    }


def _torchvision(draw: Draw) -> dict[str, Any]:
    name = _pick(draw, _TORCHVISION)
    sizes = [
        size
        for size in _IMAGE_SIZES
        if size >= (160 if name.startswith(("inception", "alexnet", "swin", "vit")) else 96)
    ]
    return {
        "library": "torchvision",
        "model": name,
        "image_size": _pick(draw, sizes),
        "classes": _pick(draw, _CLASSES),
    }


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of a transformer for text."""

    width: int
    depth: int
    heads: int
    groups: int
    inner: int
    vocabulary: int
    length: int


def _draw_sizes(draw: Draw) -> _Sizes:
    head = _pick(draw, _HEAD_WIDTHS)
    heads = max(2, 2 * round(_between(draw, 128, _LARGEST_WIDTH) / head / 2))
    width = min(head * heads, _LARGEST_WIDTH // head * head)
    heads = width // head
    depth = round(_between(draw, 2, 16))
    while 12 * width * width * depth > _LARGEST_BODY:
        depth -= 1
    ratio = _pick(draw, (2.0, 2.6875, 4.0, 4.0, 4.0, 4.0))
    vocabulary = (
        _pick(draw, _VOCABULARIES)
        if draw.random() < 0.7
        else 64 * round(_between(draw, 2_000, 150_000) / 64)
    )
    groups = heads // _pick(draw, [n for n in (1, 1, 2, 4, 8) if heads % n == 0])
    inner = 16 * round(width * ratio / 16)
    return _Sizes(width, depth, heads, groups, inner, vocabulary, _pick(draw, _LENGTHS))


def _bert_settings(s: _Sizes) -> dict[str, Any]:
    return {
        "hidden_size": s.width,
        "num_hidden_layers": s.depth,
        "num_attention_heads": s.heads,
        "intermediate_size": s.inner,
        "vocab_size": s.vocabulary,
        "max_position_embeddings": max(512, s.length) + 2,
    }


def _albert_settings(s: _Sizes) -> dict[str, Any]:
    return {**_bert_settings(s), "embedding_size": 128}


def _distilbert_settings(s: _Sizes) -> dict[str, Any]:
    return {
        "dim": s.width,
        "n_layers": s.depth,
        "n_heads": s.heads,
        "hidden_dim": s.inner,
        "vocab_size": s.vocabulary,
        "max_position_embeddings": max(512, s.length),
    }


def _gpt2_settings(s: _Sizes) -> dict[str, Any]:
    return {
        "n_embd": s.width,
        "n_layer": s.depth,
        "n_head": s.heads,
        "n_inner": s.inner,
        "vocab_size": s.vocabulary,
        "n_positions": max(1024, s.length),
    }


def _opt_settings(s: _Sizes) -> dict[str, Any]:
    return {
        "hidden_size": s.width,
        "word_embed_proj_dim": s.width,
        "num_hidden_layers": s.depth,
        "num_attention_heads": s.heads,
        "ffn_dim": s.inner,
        "vocab_size": s.vocabulary,
        "max_position_embeddings": max(2048, s.length),
    }


def _llama_settings(s: _Sizes) -> dict[str, Any]:
    return {**_bert_settings(s), "num_key_value_heads": s.groups, "max_position_embeddings": 4096}


def _t5_settings(s: _Sizes) -> dict[str, Any]:
    half = max(1, s.depth // 2)
    return {
        "d_model": s.width,
        "d_kv": s.width // s.heads,
        "d_ff": s.inner,
        "num_layers": half,
        "num_decoder_layers": half,
        "num_heads": s.heads,
        "vocab_size": s.vocabulary,
        "decoder_start_token_id": 0,
        "feed_forward_proj": "relu" if s.inner == 4 * s.width else "gated-gelu",
    }


def _bart_settings(s: _Sizes) -> dict[str, Any]:
    half = max(1, s.depth // 2)
    return {
        "d_model": s.width,
        "encoder_layers": half,
        "decoder_layers": half,
        "encoder_attention_heads": s.heads,
        "decoder_attention_heads": s.heads,
        "encoder_ffn_dim": s.inner,
        "decoder_ffn_dim": s.inner,
        "vocab_size": s.vocabulary,
        "max_position_embeddings": max(1024, s.length),
    }


_TEXT: Final[Mapping[str, tuple[tuple[str, ...], Callable[[_Sizes], dict[str, Any]]]]] = {
    "Bert": (("ForMaskedLM", "ForSequenceClassification"), _bert_settings),
    "Roberta": (("ForMaskedLM", "ForSequenceClassification"), _bert_settings),
    "DistilBert": (("ForMaskedLM", "ForSequenceClassification"), _distilbert_settings),
    "Electra": (("ForSequenceClassification",), _bert_settings),
    "Albert": (("ForMaskedLM", "ForSequenceClassification"), _albert_settings),
    "GPT2": (("LMHeadModel",), _gpt2_settings),
    "GPTNeoX": (("ForCausalLM",), _bert_settings),
    "OPT": (("ForCausalLM",), _opt_settings),
    "Llama": (("ForCausalLM",), _llama_settings),
    "Mistral": (("ForCausalLM",), _llama_settings),
    "Qwen2": (("ForCausalLM",), _llama_settings),
    "T5": (("ForConditionalGeneration",), _t5_settings),
    "Bart": (("ForConditionalGeneration",), _bart_settings),
}
"""Name in transformers → its heads, and its configuration for given sizes."""
_KEEPS_KEYS: Final = frozenset(
    {"GPT2", "GPTNeoX", "OPT", "Llama", "Mistral", "Qwen2", "T5", "Bart"}
)
"""Decoders that by default keep keys and values while they train too (``use_cache``)."""
_READS_MASKS: Final = frozenset({"Bart"})
"""Networks whose choice of a fused attention kernel reads the values of a mask, which a trace does
not have."""


def _text(draw: Draw) -> dict[str, Any]:
    name = _pick(draw, tuple(_TEXT))
    heads, settings = _TEXT[name]
    sizes, head = _draw_sizes(draw), _pick(draw, heads)
    chosen = settings(sizes)
    if name in _KEEPS_KEYS:
        chosen["use_cache"] = bool(draw.random() < 0.5)
    is_written_out = draw.random() < 0.2 or name in _READS_MASKS
    chosen["attn_implementation"] = "eager" if is_written_out else "sdpa"
    return {
        "library": "transformers",
        "model": f"{name}{head}",
        "configuration": f"{name}Config",
        "settings": chosen,
        "length": sizes.length,
    }


def _vision_transformer(draw: Draw) -> dict[str, Any]:
    name, patch = _pick(draw, ("ViT", "ViT", "DeiT")), _pick(draw, (14, 16, 16, 32))
    sizes = _draw_sizes(draw)
    side = patch * round(_pick(draw, _IMAGE_SIZES) / patch)
    settings = {
        "image_size": side,
        "patch_size": patch,
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.depth,
        "num_attention_heads": sizes.heads,
        "intermediate_size": sizes.inner,
        "attn_implementation": "eager" if draw.random() < 0.2 else "sdpa",
        "num_labels": _pick(draw, _CLASSES),
    }
    return _hugging_image(f"{name}ForImageClassification", f"{name}Config", settings, side)


def _stages(draw: Draw) -> dict[str, Any]:
    """Networks of four stages, each twice as wide as the one before: Swin and ConvNeXt."""
    width, middle, side = (
        _pick(draw, (48, 64, 96, 96, 128)),
        round(_between(draw, 2, 12)),
        _pick(draw, (128, 224, 224, 256, 384)),
    )
    settings: dict[str, Any] = {"image_size": side, "num_labels": _pick(draw, _CLASSES)}
    if draw.random() < 0.5:
        settings |= {"hidden_sizes": [width * 2**i for i in range(4)], "depths": [2, 2, middle, 2]}
        return _hugging_image("ConvNextForImageClassification", "ConvNextConfig", settings, side)
    heads = [width * 2**i // 16 for i in range(4)]
    window = 7 if side == 224 else 8
    settings |= {
        "embed_dim": width,
        "depths": [2, 2, middle, 2],
        "num_heads": heads,
        "window_size": window,
    }
    return _hugging_image("SwinForImageClassification", "SwinConfig", settings, side)


def _hugging_image(
    model: str, configuration: str, settings: dict[str, Any], side: int
) -> dict[str, Any]:
    return {
        "library": "transformers",
        "model": model,
        "configuration": configuration,
        "settings": settings,
        "image_size": side,
    }


def _recurrent(draw: Draw) -> dict[str, Any]:
    settings = {
        "cell": _pick(draw, ("lstm", "gru")),
        "vocabulary": 64 * round(_between(draw, 5_000, 100_000) / 64),
        "embedding": 32 * round(_between(draw, 64, 1024) / 32),
        "width": 32 * round(_between(draw, 64, 2048) / 32),
        "depth": int(draw.integers(1, 5)),
        "dropout": _pick(draw, (0.0, 0.2, 0.5)),
    }
    model = _pick(draw, ("text_classifier", "language_model"))
    if model == "text_classifier":
        settings |= {"bidirectional": bool(draw.random() < 0.5), "classes": _pick(draw, (2, 5, 20))}
    return {
        "library": "own",
        "model": model,
        "settings": settings,
        "length": _pick(draw, _LENGTHS[:6]),
    }


def _recommender(draw: Draw) -> dict[str, Any]:
    settings = {
        "dense": int(draw.integers(4, 65)),
        "tables": int(draw.integers(4, 41)),
        "rows": round(_between(draw, 1_000, 1_000_000)),
        "width": _pick(draw, (16, 32, 64, 128)),
        "bottom": [_pick(draw, (256, 512, 1024)) for _ in range(int(draw.integers(1, 4)))],
        "top": [_pick(draw, (256, 512, 1024)) for _ in range(int(draw.integers(1, 4)))],
    }
    return {"library": "own", "model": "recommender", "settings": settings}


_SOURCES: Final[Sequence[tuple[float, Callable[[Draw], dict[str, Any]]]]] = (
    (0.3, _timm),
    (0.15, _torchvision),
    (0.33, _text),
    (0.07, _vision_transformer),
    (0.04, _stages),
    (0.06, _recurrent),
    (0.05, _recommender),
)
"""Share of each source, and its draw."""
