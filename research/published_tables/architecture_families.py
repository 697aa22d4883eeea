"""The family of an architecture by the name of its model: networks of one family are never split
between training and test.

A family holds what is built from the same blocks: every ResNet with its attention, grouped,
pre-activation and ECA variants, every plain vision transformer, whoever trained it, every encoder
like BERT, every decoder like GPT.  The rule reads nothing but the name, so no reading can move a
model.
"""

from __future__ import annotations

import re
from typing import Final

_PATTERNS: Final = tuple(
    (family, re.compile(pattern))
    for family, pattern in (
        ("vit", r"^(test_vit|vit_|deit|beit|eva|flexivit|samvit|cait|convit)"),
        ("bert", r"^((al|distil|ro)?bert|electra)"),
        ("gpt", r"^(gpt|opt(_|$))"),
        ("llama", r"^(llama|mistral|qwen)"),
        ("tiny_vit", r"^tiny_vit"),
        ("mlp_mixer", r"^(mixer|gmixer|gmlp|resmlp)"),
        ("swin", r"^swin"),
        ("maxvit", r"^(maxx?vit|coatnet)"),
        ("metaformer", r"^(caformer|convformer|poolformer)"),
        ("hiera", r"hiera"),
        ("regnet", r"regnet"),
        ("resnet", r"res(net|next|nest)|res2ne(t|xt)|senet154|(bot|halo)ne(t|xt)"),
        ("darknet", r"darknet|edgenet"),
        ("efficientnet", r"efficientnet|tinynet|mixnet"),
        ("mobilenet", r"mobilenet|mnasnet|spnasnet|fbnet|hardcorenas|lcnet"),
        ("nasnet", r"^p?nasnet"),
        ("ghostnet", r"ghostnet"),
        ("rexnet", r"^rexnet"),
        ("nfnet", r"nfnet"),
        ("vovnet", r"vovnet"),
        ("xception", r"xception"),
        ("inception_next", r"^inception_next"),
        ("inception", r"^googlenet"),
        ("t5", r"^t5"),
    )
)
"""Family → what a name of it contains; the first pattern that fits decides."""
_FIRST_WORD: Final = re.compile(r"[a-z]+?(?=v?[0-9]|[_./]|$)")


def architecture_family(name: str) -> str:
    """The family of the model called ``name``, as timm, torchvision or transformers call it; else
    its first word."""
    plain = name.casefold().partition(".")[0]
    for family, pattern in _PATTERNS:
        if pattern.search(plain):
            return family
    word = _FIRST_WORD.match(plain)
    return word.group(0) if word else plain
