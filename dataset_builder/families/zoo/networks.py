"""Makes the networks of the zoo with their libraries; each of them returns logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .. import cnn
from ..cnn.architecture import CnnArchitecture
from .catalogue import IMAGE_CLASSES, PIXEL_CLASSES, Entry

if TYPE_CHECKING:
    from collections.abc import Mapping


class Logits(nn.Module):
    """Wraps a network: passes its inputs by name if it needs names, and returns only the logits."""

    def __init__(self, network: nn.Module, output: str, inputs: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.network = network
        self.output = output
        self.inputs = inputs

    def forward(self, *tensors: Tensor) -> Tensor:
        """The logits, in the shape that the network gives them."""
        named = dict(zip(self.inputs, tensors, strict=True)) if self.inputs else {}
        answer: Mapping[str, Tensor] = self.network(**named) if named else self.network(*tensors)
        return answer[self.output]


def make(entry: Entry, image_size: int) -> nn.Module:
    """The network of ``entry`` on torch's current default device, with random weights.

    Raises:
        ModuleNotFoundError: when its library is not installed.
    """
    sized: dict[str, Any] = {entry.size_argument: image_size} if entry.size_argument else {}
    if entry.library == "torchvision":
        import torchvision

        arguments = {"weights": None, **entry.settings, **sized}
        if entry.task == "pixels":
            return Logits(
                torchvision.models.get_model(entry.name, num_classes=PIXEL_CLASSES, **arguments),
                "out",
            )
        made: nn.Module = torchvision.models.get_model(
            entry.name, num_classes=IMAGE_CLASSES, **arguments
        )
        return made
    if entry.library == "timm":
        import timm

        created: nn.Module = timm.create_model(
            entry.name, pretrained=False, num_classes=IMAGE_CLASSES, **entry.settings, **sized
        )
        return created
    if entry.library == "transformers":
        return _language_model(entry)
    return cnn.build(unet(image_size))


def _language_model(entry: Entry) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(entry.name, use_cache=False, **entry.settings)
    makers = {
        "causal": transformers.AutoModelForCausalLM,
        "masked": transformers.AutoModelForMaskedLM,
        "translation": transformers.AutoModelForSeq2SeqLM,
    }
    inputs = ("input_ids", "decoder_input_ids") if entry.task == "translation" else ("input_ids",)
    return Logits(makers[entry.task].from_config(config), "logits", inputs)


def unet(image_size: int) -> CnnArchitecture:
    """The original U-Net (arXiv 1505.04597), with padding and batch norm as it is used today."""
    return CnnArchitecture(
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
