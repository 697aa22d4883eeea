"""The real networks of the zoo: which library makes each, and with which settings; weights are
random, nothing is downloaded.

Sizes of language models are those of their papers' small to medium versions, written out, because a
configuration by name would be fetched from a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Entry:
    """One network of the zoo.

    Attributes:
        library: package that makes it.
        name: what the library calls it; for transformers, its model type.
        task: ``image`` (one class), ``pixels`` (a class for each), ``causal``, ``masked`` or
            ``translation`` (a token for each).
        settings: arguments of the library's constructor or configuration.
        size_argument: keyword that takes the image's side, for networks that are made for one size.
    """

    library: str
    name: str
    task: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    size_argument: str | None = None


IMAGE_CLASSES: Final = 1000
PIXEL_CLASSES: Final = 21

_TORCHVISION: Final = (
    *(
        "resnet18",
        "resnet50",
        "resnet101",
        "resnext50_32x4d",
        "wide_resnet50_2",
        "vgg11",
        "vgg16_bn",
        "alexnet",
        "densenet121",
    ),
    *(
        "squeezenet1_1",
        "mobilenet_v2",
        "mobilenet_v3_large",
        "shufflenet_v2_x1_0",
        "mnasnet1_0",
        "efficientnet_b0",
    ),
    *("efficientnet_b3", "efficientnet_v2_s", "convnext_tiny", "convnext_base", "swin_t", "swin_b"),
)
_TIMM: Final = (
    *(
        "resnet50d",
        "resnetv2_50",
        "xception41",
        "dla34",
        "res2net50_26w_4s",
        "hrnet_w18",
        "cspdarknet53",
        "repvgg_b0",
        "regnety_032",
    ),
    *(
        "ghostnet_100",
        "tf_efficientnet_b2",
        "nfnet_l0",
        "convnextv2_tiny",
        "mobilevit_s",
        "poolformer_s24",
        "vovnet39a",
    ),
)
_TIMM_SIZED: Final = (
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "deit3_small_patch16_224",
    "mixer_b16_224",
)

_LLAMA: Final = {
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
}
_BERT: Final = {"vocab_size": 30_522, "max_position_embeddings": 1026}

_LANGUAGE_MODELS: Final[Mapping[str, Entry]] = {
    "bert-base": Entry("transformers", "bert", "masked", _BERT),
    "bert-large": Entry(
        "transformers",
        "bert",
        "masked",
        _BERT
        | {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    ),
    "distilbert": Entry("transformers", "distilbert", "masked", _BERT),
    "roberta-base": Entry(
        "transformers", "roberta", "masked", {"vocab_size": 50_265, "max_position_embeddings": 1026}
    ),
    "electra-small": Entry("transformers", "electra", "masked", _BERT),
    "gpt2": Entry("transformers", "gpt2", "causal", {"vocab_size": 50_257}),
    "gpt2-medium": Entry(
        "transformers",
        "gpt2",
        "causal",
        {"vocab_size": 50_257, "n_embd": 1024, "n_layer": 24, "n_head": 16},
    ),
    "bloom-120m": Entry(
        "transformers",
        "bloom",
        "causal",
        {"hidden_size": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50_304},
    ),
    "pythia-160m": Entry(
        "transformers",
        "gpt_neox",
        "causal",
        {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "vocab_size": 50_304,
        },
    ),
    "llama-300m": Entry(
        "transformers",
        "llama",
        "causal",
        _LLAMA | {"hidden_size": 1024, "num_hidden_layers": 16, "intermediate_size": 2816},
    ),
    "qwen2-400m": Entry(
        "transformers",
        "qwen2",
        "causal",
        _LLAMA
        | {
            "hidden_size": 896,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151_936,
        }
        | {"num_hidden_layers": 16, "intermediate_size": 4864, "tie_word_embeddings": True},
    ),
    "t5-small": Entry("transformers", "t5", "translation", {"vocab_size": 32_128}),
    "t5-base": Entry(
        "transformers",
        "t5",
        "translation",
        {"vocab_size": 32_128, "d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    ),
}

CATALOGUE: Final[Mapping[str, Entry]] = {
    "unet": Entry("gpumemnet", "unet", "pixels"),
    **{f"torchvision/{name}": Entry("torchvision", name, "image") for name in _TORCHVISION},
    "torchvision/vit_b_16": Entry("torchvision", "vit_b_16", "image", size_argument="image_size"),
    **{
        f"torchvision/{name}": Entry("torchvision", name, "pixels", {"weights_backbone": None})
        for name in ("fcn_resnet50", "deeplabv3_resnet50")
    },
    **{f"timm/{name}": Entry("timm", name, "image") for name in _TIMM},
    **{
        f"timm/{name}": Entry("timm", name, "image", size_argument="img_size")
        for name in _TIMM_SIZED
    },
    **{f"transformers/{name}": entry for name, entry in _LANGUAGE_MODELS.items()},
}
"""Name in a recipe and in a row → the network.  The U-Net is the original's (arXiv 1505.04597), of
this project's parts."""
