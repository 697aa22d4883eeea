"""``python -m research catalogue``: makes the catalogue of named models from a table of
configurations.

A model is kept if the total of its parameters, computed from its blocks, differs by at most 1 % from
the published one, or from the recalled one where no source states it; the catalogue says which.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, Final

import gpumemnet
from gpumemnet.atomic_files import replace_file
from gpumemnet.errors import InvalidRequestError
from gpumemnet.named.architectures import network

TOLERANCE: Final = 0.01
_ANY_LENGTH: Final = 128
_COUNTS: Final = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "shared_experts": "n_shared_experts",
    "first_dense_layers": "first_k_dense_replace",
    **{
        name: name
        for name in (
            *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "intermediate_size", "vocab_size", "max_position_embeddings"),
            *("moe_intermediate_size", "sliding_window"),
        )
    },
}
_SWITCHES: Final = ("tie_word_embeddings", "attention_bias", "qkv_bias")
_CHECKED: Final = {"yes": "published", "recalled": "recalled"}
_NOT_NEEDED: Final = (
    *("rope_scaling", "rope_theta", "rms_norm_eps", "pad_token_id", "counted_as", "library"),
    *("router_aux_loss_coef", "norm_topk_prob", "remote_code", "config_json_model_type"),
    *(
        "intermediate_size_is",
        "hf_architecture",
        "layer_types_count",
        "config_json_intermediate_size",
    ),
)


def config_of_row(row: dict[str, str]) -> dict[str, Any]:
    """The configuration that a row of the table states."""
    config = json.loads(row["other"] or "{}")
    config = {name: value for name, value in config.items() if name not in _NOT_NEEDED}
    config |= {name: int(row[column]) for column, name in _COUNTS.items() if row[column]}
    config |= {name: row[name] == "yes" for name in _SWITCHES if row[name] in ("yes", "no")}
    return {"model_type": row["model_type"], "architectures": [row["architecture"]], **config}


def make_catalogue(table: Path, out: Path) -> str:
    """Writes the catalogue, and returns one line for each model that is left out."""
    models: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    lines = []
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        name, config = row["hub_id"], config_of_row(row)
        stated = row["published_parameters"] or row["recalled_parameters"]
        stated = stated or row["computed_parameters"]
        try:
            computed = network(config, _ANY_LENGTH).parameters
        except InvalidRequestError as error:
            lines.append(f"{name}: {error.reason}")
            continue
        if abs(computed / int(stated) - 1.0) > TOLERANCE:
            lines.append(f"{name}: {computed:,} parameters instead of {int(stated):,}")
            continue
        models[name] = {
            "parameters": int(stated),
            "checked": _CHECKED.get(row["checked"], "unchecked"),
            "config": config,
        }
        aliases |= {alias: name for alias in row["aliases"].split(";") if alias.strip()}
    text = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in models.items()]
    document = ",\n".join(text)
    body = f'{{"models": {{\n{document}\n}},\n"aliases": {json.dumps(aliases, indent=0)}}}\n'
    replace_file(out, body.encode())
    return "\n".join([*lines, f"{len(models)} models, {len(aliases)} aliases: {out}"])


TIMM: Final = (
    *("convnext_tiny", "convnext_small", "convnext_base", "convnext_large", "convnextv2_base"),
    *("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224"),
    *("vit_large_patch16_224", "deit_small_patch16_224", "deit_base_patch16_224"),
    *("swin_tiny_patch4_window7_224", "swin_small_patch4_window7_224"),
    *("swin_base_patch4_window7_224", "beit_base_patch16_224", "mixer_b16_224"),
    *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet50d", "resnext50_32x4d"),
    *("wide_resnet50_2", "seresnet50", "resnest50d", "regnety_032", "regnety_160", "densenet121"),
    *("efficientnet_b0", "efficientnet_b1", "efficientnet_b2", "efficientnet_b3"),
    *("efficientnet_b4", "tf_efficientnetv2_s", "tf_efficientnetv2_m", "mobilenetv2_100"),
    *("mobilenetv3_large_100", "mobilenetv4_conv_medium", "mobileone_s1", "repvgg_b0"),
    *("ghostnet_100", "mnasnet_100", "edgenext_small", "poolformer_s24", "maxvit_tiny_tf_224"),
    *("coatnet_0_rw_224", "xception41", "vgg16", "nfnet_f0", "darknet53"),
)
TORCHVISION: Final = (
    *("alexnet", "convnext_tiny", "convnext_base", "densenet121", "efficientnet_b0"),
    *("efficientnet_v2_s", "mnasnet1_0", "mobilenet_v2", "mobilenet_v3_large"),
    *("regnet_y_400mf", "regnet_y_8gf", "resnet18", "resnet34", "resnet50", "resnet101"),
    *("resnet152", "resnext50_32x4d", "shufflenet_v2_x1_0", "squeezenet1_0", "swin_t", "swin_b"),
    *("vgg11", "vgg16", "vgg19_bn", "vit_b_16", "vit_l_16", "wide_resnet50_2"),
)
IMAGE_SIZE: Final = 224


def make_image_networks(out: Path) -> str:
    """Extracts the image networks from the libraries that are named like them."""
    import timm
    import torch
    import torchvision

    from gpumemnet.extract import extract_job

    image = torch.zeros(2, 3, IMAGE_SIZE, IMAGE_SIZE, device="meta")
    makers = (
        ("timm", TIMM, timm.create_model),
        ("torchvision", TORCHVISION, torchvision.models.get_model),
    )
    lines = []
    for library, names, create in makers:
        for name in names:
            with gpumemnet.large_tensors_on_meta():
                model = create(name)
            model.to("meta")
            layers = [list(layer) for layer in extract_job(model, image).job.layers]
            config = {"model_type": "layers", "image_size": IMAGE_SIZE, "layers": layers}
            parameters = sum(each.numel() for each in model.parameters())
            entry = {"parameters": parameters, "checked": "published", "config": config}
            text = json.dumps(entry, separators=(",", ":"))
            lines.append(f"{json.dumps(f'{library}/{name}')}: {text}")
    replace_file(out, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    return f"{len(lines)} image networks: {out}"
