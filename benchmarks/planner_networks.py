"""The six networks of the planner's benchmarks, with the batch sizes and number formats that they
are usually trained with.

Each ``make`` of :data:`PLANNER_NETWORKS` returns ``(model, inputs)``; weights are on the meta
device where a caller builds under ``gpumemnet.large_tensors_on_meta``.  Needs torchvision, timm and
transformers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import nn

from benchmarks.ordinary_networks import Network, UNet, hugging_face, vision

_AMP: Final = {"precision": "amp_bf16"}


def _gpt2(name: str, **sizes: int) -> Network:
    made = hugging_face(
        "GPT2", "LMHeadModel", "GPT", 8, length=1024, options=_AMP, use_cache=False, **sizes
    )
    return replace(made, name=name)


def _unet(batch_size: int) -> tuple[nn.Module, Any]:
    return UNet(), torch.empty(batch_size, 3, 512, 512, device="meta")


PLANNER_NETWORKS: Final = {
    network.name: network
    for network in (
        replace(
            vision("torchvision", "resnet50", "ResNet", 256, optimizer="sgd_momentum", **_AMP),
            name="ResNet-50",
        ),
        replace(vision("timm", "vit_large_patch16_224", "ViT", 64, **_AMP), name="ViT-L"),
        _gpt2("GPT-2 XL", n_embd=1600, n_layer=48, n_head=25),
        replace(
            hugging_face(
                *("Bert", "ForMaskedLM", "BERT", 32),
                inputs="masked",
                length=512,
                options=_AMP,
                hidden_size=1024,
                num_hidden_layers=24,
                num_attention_heads=16,
                intermediate_size=4096,
            ),
            name="BERT-large",
        ),
        Network("U-Net", "U-Net", _unet, batch_size=16, precision="amp_bf16"),
        replace(
            hugging_face(
                *("Llama", "ForCausalLM", "Llama", 4),
                length=2048,
                options={"precision": "bf16"},
                use_cache=False,
                hidden_size=4096,
                num_hidden_layers=32,
                num_attention_heads=32,
                intermediate_size=11008,
            ),
            name="Llama 7B",
        ),
    )
}
"""Name → network.  The Llama has 6.7 billion parameters; its weights, gradients and optimizer state
are in bf16."""
MANY_UNITS: Final = _gpt2("GPT, 100 blocks", n_embd=1024, n_layer=100, n_head=16)
"""A network of 100 units, to see how long the searches take."""


def build(network: str) -> tuple[nn.Module, Any]:
    """Build one by its name, with its usual batch, for ``gpumemnet plan
    benchmarks/planner_networks.py:build``."""
    chosen = PLANNER_NETWORKS[network]
    return chosen.make(chosen.batch_size)
