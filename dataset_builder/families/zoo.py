"""Real networks from torchvision, timm and transformers, to test how estimators generalise; never a
source of training data.

The libraries are optional: networks of a library that is not installed are left out, with a reason.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from gpumemnet.errors import DatasetError
from gpumemnet.job.layers import describe

from . import Feature, RoughSizes, TensorSpec, cnn, extracted_job, multiply_adds
from .zoo_catalogue import CATALOGUE, IMAGE_CLASSES, PIXEL_CLASSES, Entry

if TYPE_CHECKING:
    from torch import Tensor, nn

FEATURES: Final[Mapping[str, Feature]] = {
    "model": Feature(str, choices=tuple(CATALOGUE)),
    "image_size": Feature(int, 64, 1024),
    "sequence_length": Feature(int, 8, 1024),
}
IMAGE_GRANULE: Final = 32
_SMALLEST_IMAGE: Final = 128
_SMALLEST_TEXT: Final = 128
_GROWING: Final = ("activations", "recomputed_activations", "largest", "multiply_adds")
"""Sizes that grow with the input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooArchitecture:
    """One network of the zoo.

    Attributes:
        model: name in :data:`~dataset_builder.families.zoo_catalogue.CATALOGUE`.
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
        for value in (self.image_size, self.sequence_length):
            if type(value) is not int or value < 0:
                raise DatasetError(
                    f"a zoo model's sizes must be whole numbers, not {describe(value)}"
                )
        if self.reads_text != bool(self.sequence_length) or self.reads_text == bool(
            self.image_size
        ):
            raise DatasetError(
                f"{self.model} needs {'a sequence length' if self.reads_text else 'an image size'} and no other size"
            )
        if self.image_size % IMAGE_GRANULE:
            raise DatasetError(
                f"a zoo model's image size must be a multiple of {IMAGE_GRANULE}, not {self.image_size}"
            )

    @property
    def entry(self) -> Entry:
        """Where the network comes from."""
        return CATALOGUE[self.model]

    @property
    def reads_text(self) -> bool:
        """Whether its inputs are tokens."""
        return self.entry.library == "transformers"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; :func:`parse` is the inverse."""
        return dataclasses.asdict(self)


def compose(values: Mapping[str, Any]) -> ZooArchitecture:
    """The architecture for one value of every feature in :data:`FEATURES`, of which a model has
    either size."""
    if CATALOGUE[values["model"]].library == "transformers":
        return ZooArchitecture(model=values["model"], sequence_length=values["sequence_length"])
    size = max(IMAGE_GRANULE, values["image_size"] // IMAGE_GRANULE * IMAGE_GRANULE)
    return ZooArchitecture(model=values["model"], image_size=size)


def parse(document: Mapping[str, Any]) -> ZooArchitecture:
    """The architecture from :meth:`ZooArchitecture.to_dict`.

    Raises:
        DatasetError: on unknown, missing or impossible values.
    """
    try:
        return ZooArchitecture(**document)
    except TypeError as error:
        raise DatasetError(f"the architecture is not that of a zoo model: {error}") from None


def obstacle(architecture: ZooArchitecture, batch_size: int) -> str | None:
    """Why the network cannot train: its library is not installed, or the batch has one sample,
    which batch norms refuse."""
    if missing := _missing(architecture):
        return missing
    if batch_size < 2 and not architecture.reads_text:
        return "batch norm cannot train on batches of one sample"
    return None


def rough_sizes(architecture: ZooArchitecture) -> RoughSizes:
    """Those that are extracted at the smallest usual size, in proportion to the elements of the
    input."""
    text = architecture.reads_text
    smallest = ZooArchitecture(
        model=architecture.model,
        image_size=0 if text else _SMALLEST_IMAGE,
        sequence_length=_SMALLEST_TEXT if text else 0,
    )
    ratio = (
        architecture.sequence_length / _SMALLEST_TEXT
        if text
        else (architecture.image_size / _SMALLEST_IMAGE) ** 2
    )
    sizes = _extracted_sizes(smallest)
    larger = {name: getattr(sizes, name) * ratio for name in _GROWING}
    return dataclasses.replace(sizes, **larger)


@cache
def _extracted_sizes(architecture: ZooArchitecture) -> RoughSizes:
    job = extracted_job("zoo", architecture)
    outputs = [layer.activations for layer in job.layers]
    assert job.total_parameters is not None
    return RoughSizes(
        job.total_parameters,
        sum(outputs),
        sum(outputs),
        max(outputs),
        outputs[-1],
        multiply_adds("zoo", architecture),
    )


def build(architecture: ZooArchitecture) -> nn.Module:
    """The network on torch's current default device; random weights.

    Raises:
        DatasetError: when the library is not installed.
    """
    if missing := _missing(architecture):
        raise DatasetError(missing)
    entry, size = architecture.entry, architecture.image_size
    sized: dict[str, Any] = {entry.size_argument: size} if entry.size_argument else {}
    if entry.library == "torchvision":
        import torchvision

        classes = PIXEL_CLASSES if entry.task == "pixels" else IMAGE_CLASSES
        made: nn.Module = torchvision.models.get_model(
            entry.name, weights=None, num_classes=classes, **entry.settings, **sized
        )
        return _logits(made, "out") if entry.task == "pixels" else made
    if entry.library == "timm":
        import timm

        created: nn.Module = timm.create_model(
            entry.name, pretrained=False, num_classes=IMAGE_CLASSES, **entry.settings, **sized
        )
        return created
    if entry.library == "transformers":
        return _language_model(entry)
    return cnn.build(unet(size))


def _language_model(entry: Entry) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(entry.name, use_cache=False, **entry.settings)
    makers = {
        "causal": transformers.AutoModelForCausalLM,
        "masked": transformers.AutoModelForMaskedLM,
        "translation": transformers.AutoModelForSeq2SeqLM,
    }
    inputs = ("input_ids", "decoder_input_ids") if entry.task == "translation" else ("input_ids",)
    return _logits(makers[entry.task].from_config(config), "logits", inputs)


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


def unet(image_size: int) -> cnn.CnnArchitecture:
    """The original U-Net (arXiv 1505.04597), with padding and batch norm as it is used today."""
    return cnn.CnnArchitecture(
        style="unet",
        image_size=image_size,
        input_channels=3,
        classes=PIXEL_CLASSES,
        widths=(64, 128, 256, 512, 1024),
        depths=(1, 1, 1, 1, 1),
        kernel=3,
        groups=1,
        expansion=1,
        stem="conv",
        downsampling="max_pool",
        upsampling="conv_transpose",
        norm="batch_norm",
        activation="relu",
        in_place=True,
        squeeze_excitation=False,
        block_dropout=0.0,
        head="per_pixel",
        head_dropout=0.0,
    )


def tensors(architecture: ZooArchitecture) -> tuple[tuple[TensorSpec, ...], TensorSpec]:
    """An image or tokens; a class, or one for every pixel or token."""
    entry, size = architecture.entry, architecture.image_size
    if architecture.reads_text:
        tokens = TensorSpec((architecture.sequence_length,), entry.settings["vocab_size"])
        return (tokens, tokens) if entry.task == "translation" else (tokens,), tokens
    target = (
        TensorSpec((size, size), PIXEL_CLASSES)
        if entry.task == "pixels"
        else TensorSpec((), IMAGE_CLASSES)
    )
    return (TensorSpec((3, size, size)),), target


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the logits ``[batch, classes, …]``, or of a language model's ``[batch,
    tokens, vocabulary]``."""
    from torch.nn import functional

    if outputs.shape[:-1] == targets.shape and targets.ndim == 2:
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    return functional.cross_entropy(outputs, targets)


@cache
def _installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def _missing(architecture: ZooArchitecture) -> str | None:
    library = architecture.entry.library
    if _installed(library):
        return None
    return f"{architecture.model} needs {library}, which is not installed: pip install {library}, or leave it out of the recipe"
