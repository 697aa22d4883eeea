"""Real networks from torchvision, timm and transformers with random weights, to test how estimators
generalise; never a source of training data.

``zoo.json`` lists them.  Language models are built from settings of small to medium published
sizes, because a configuration by name would be fetched from a server.  The libraries are optional:
networks of a library that is not installed are left out.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpumemnet.errors import DatasetError
from gpumemnet.job.layers import describe

from . import Architecture, Feature, RoughSizes, TensorSpec, extracted_job

if TYPE_CHECKING:
    from torch import Tensor, nn

CATALOGUE: Final[Mapping[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_suffix(".json").read_text()
)
"""LIBRARY/NAME → its ``task``: ``image`` (one class), ``pixels`` (a class for each), ``causal``,
``masked`` or ``translation`` (a token for each); ``settings``, arguments of the constructor or of
the configuration of a model ``type``; ``size_argument``, which takes the image's side where a
network is made for one size."""
IMAGE_CLASSES: Final = 1000
PIXEL_CLASSES: Final = 21
IMAGE_GRANULE: Final = 32
_SMALLEST: Final = 128

FEATURES: Final[Mapping[str, Feature]] = {
    "model": Feature(str, choices=tuple(CATALOGUE)),
    "image_size": Feature(int, 64, 1024),
    "sequence_length": Feature(int, 8, 1024),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooArchitecture(Architecture):
    """One network of the zoo.

    Attributes:
        model: name in :data:`CATALOGUE`.
        image_size: side of the square images in pixels, a multiple of 32; 0 for text models.
        sequence_length: tokens per sample; 0 for image models.

    Raises:
        DatasetError: on an unknown model, or sizes that it does not take.
    """

    model: str
    image_size: int = 0
    sequence_length: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or self.model not in CATALOGUE:
            raise DatasetError(
                f"{describe(self.model)} is not a model of the zoo; recipes/zoo.yaml lists them"
            )
        other = "image_size" if self.reads_text else "sequence_length"
        self.check(FEATURES, **{other: (0,)})
        if self.image_size % IMAGE_GRANULE:
            raise DatasetError(
                f"a zoo model's image size must be a multiple of {IMAGE_GRANULE}, not {self.image_size}"
            )

    @property
    def library(self) -> str:
        """The package that makes it."""
        return self.model.partition("/")[0]

    @property
    def reads_text(self) -> bool:
        """Whether its inputs are tokens."""
        return self.library == "transformers"


ARCHITECTURE: Final = ZooArchitecture


def compose(values: Mapping[str, Any]) -> ZooArchitecture:
    """The architecture for one value of every feature in :data:`FEATURES`, of which a model has
    either size."""
    if values["model"].startswith("transformers/"):
        return ZooArchitecture(model=values["model"], sequence_length=values["sequence_length"])
    size = max(IMAGE_GRANULE, values["image_size"] // IMAGE_GRANULE * IMAGE_GRANULE)
    return ZooArchitecture(model=values["model"], image_size=size)


def can_train(architecture: ZooArchitecture, batch_size: int) -> bool:
    """Whether the network trains: its library is installed, and batch norms have more than one
    sample."""
    return _installed(architecture.library) and (batch_size > 1 or architecture.reads_text)


def rough_sizes(architecture: ZooArchitecture) -> RoughSizes:
    """Those that are extracted at the smallest usual size, in proportion to the elements of the
    input; operations are not known, so a long job ends at its deadline."""
    model, text = architecture.model, architecture.reads_text
    sizes = _extracted_sizes(model, text)
    ratio = architecture.sequence_length / _SMALLEST
    if not text:
        ratio = (architecture.image_size / _SMALLEST) ** 2
    return replace(sizes, activations=sizes.activations * ratio)


@cache
def _extracted_sizes(model: str, reads_text: bool) -> RoughSizes:
    size = "sequence_length" if reads_text else "image_size"
    layers = extracted_job("zoo", ZooArchitecture(model=model, **{size: _SMALLEST})).layers
    outputs = [layer.activations for layer in layers]
    parameters = sum(layer.parameters for layer in layers)
    return RoughSizes(parameters, sum(outputs), outputs[-1], 0)


def build(architecture: ZooArchitecture) -> nn.Module:
    """The network on torch's current default device; random weights.

    Raises:
        DatasetError: when the library is not installed.
    """
    library = architecture.library
    if not _installed(library):
        raise DatasetError(
            f"{architecture.model} needs {library}, which is not installed: pip install {library}, or leave it out of the recipe"
        )
    entry, name = CATALOGUE[architecture.model], architecture.model.partition("/")[2]
    if architecture.reads_text:
        return _language_model(entry)
    settings = dict(entry.get("settings", {}))
    if argument := entry.get("size_argument"):
        settings[argument] = architecture.image_size
    if library == "timm":
        import timm

        created: nn.Module = timm.create_model(name, num_classes=IMAGE_CLASSES, **settings)
        return created
    import torchvision

    is_dense = entry["task"] == "pixels"
    classes = PIXEL_CLASSES if is_dense else IMAGE_CLASSES
    made: nn.Module = torchvision.models.get_model(name, num_classes=classes, **settings)
    return _logits(made, "out") if is_dense else made


def _language_model(entry: Mapping[str, Any]) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(entry["type"], use_cache=False, **entry["settings"])
    makers = {
        "causal": transformers.AutoModelForCausalLM,
        "masked": transformers.AutoModelForMaskedLM,
        "translation": transformers.AutoModelForSeq2SeqLM,
    }
    task = entry["task"]
    inputs = ("input_ids", "decoder_input_ids") if task == "translation" else ("input_ids",)
    return _logits(makers[task].from_config(config), "logits", inputs)


def _logits(network: nn.Module, output: str, inputs: tuple[str, ...] = ()) -> nn.Module:
    """``network`` with its logits as the only output; its inputs are passed by name where it needs
    names."""
    from torch import nn

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, *tensors: Tensor) -> Tensor:
            named = dict(zip(inputs, tensors, strict=True)) if inputs else {}
            outputs = self.network(**named) if named else self.network(*tensors)
            logits: Tensor = outputs[output]
            return logits

    return Logits()


def tensors(architecture: ZooArchitecture) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
    """An image or tokens; a class, or one for every pixel or token."""
    entry, size = CATALOGUE[architecture.model], architecture.image_size
    if architecture.reads_text:
        tokens = TensorSpec((architecture.sequence_length,), entry["settings"]["vocab_size"])
        return (tokens, tokens) if entry["task"] == "translation" else (tokens,), tokens
    target = (
        TensorSpec((size, size), PIXEL_CLASSES)
        if entry["task"] == "pixels"
        else TensorSpec((), IMAGE_CLASSES)
    )
    return (TensorSpec((3, size, size)),), target


@cache
def _installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None
