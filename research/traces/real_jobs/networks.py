"""Real architectures as documents of names and sizes, from which a network and its inputs are built
with no weights downloaded.

A document is a JSON object: ``library`` (``timm``, ``torchvision``, ``transformers`` or ``own``),
``model``, and what else that
library's constructor is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpumemnet.extract.placement import placement
from research.published_tables.architecture_families import architecture_family
from research.published_tables.timm_models import declare_detection, load_timm

from .own_networks import OWN_NETWORKS, own_inputs

Document = Mapping[str, Any]

_WITH_AUXILIARY_HEADS: Final = ("googlenet", "inception_v3")
_RECURRENT: Final = ("text_classifier", "language_model")


def build(document: Document) -> nn.Module:
    """The network of ``document`` on meta tensors.

    Raises:
        DatasetError: timm is missing, or another version than the measured one.
    """
    declare_detection()  # timm and transformers import torchvision where it is installed
    with placement(), torch.device("meta"):
        network: nn.Module = _MAKERS[document["library"]](document)
    return network


def sample(document: Document, batch_size: int) -> Any:
    """What the network is called with: a tensor, a tuple of tensors, or keyword arguments; labels
    where it has its own loss."""
    size: int = document.get("image_size", 0)
    length: int = document.get("length", 0)
    if document["library"] == "own":
        return own_inputs(document["model"], document["settings"], length, batch_size)
    if document["library"] != "transformers":
        return _images(batch_size, size)
    if size:
        return {"pixel_values": _images(batch_size, size), "labels": _whole(batch_size)}
    tokens = _whole(batch_size, length)
    labels = (
        _whole(batch_size)
        if document["model"].endswith("ForSequenceClassification")
        else tokens.clone()
    )
    return {"input_ids": tokens, "labels": labels}


def family_of(document: Document) -> str:
    """The architecture family that a split keeps together."""
    if document["library"] == "own":
        return "recurrent" if document["model"] in _RECURRENT else "dlrm"
    return architecture_family(_family_name(document))


def head_of(network: nn.Module) -> list[nn.Parameter]:
    """Parameters of the last module that has any: what is trained when the rest of a network is
    frozen."""
    owners = [
        module
        for module in network.modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    return list(owners[-1].parameters(recurse=False))


def _family_name(document: Document) -> str:
    """The model's name, without the head that transformers adds to it: ``GPTNeoXForCausalLM`` is
    ``gptneox``."""
    name: str = document["model"]
    return (
        name.partition("For")[0].removesuffix("LMHeadModel").lower()
        if document["library"] == "transformers"
        else name
    )


def _timm(document: Document) -> nn.Module:
    network: nn.Module = load_timm().create_model(
        document["model"], num_classes=document["classes"]
    )
    return network


def _torchvision(document: Document) -> nn.Module:
    name = document["model"]
    arguments: dict[str, Any] = (
        {"init_weights": False, "aux_logits": False} if name in _WITH_AUXILIARY_HEADS else {}
    )
    if name.startswith("vit_"):
        arguments["image_size"] = document["image_size"]
    factory = getattr(import_module("torchvision.models"), name)
    network: nn.Module = factory(weights=None, num_classes=document["classes"], **arguments)
    return network


def _transformers(document: Document) -> nn.Module:
    library = import_module("transformers")
    configuration = getattr(library, document["configuration"])(**document["settings"])
    network: nn.Module = getattr(library, document["model"])(configuration)
    return network


def _own(document: Document) -> nn.Module:
    return OWN_NETWORKS[document["model"]](**document["settings"])


_MAKERS: Final = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
    "own": _own,
}


def _images(batch_size: int, size: int) -> Tensor:
    return torch.empty(batch_size, 3, size, size, device="meta")


def _whole(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.long, device="meta")
