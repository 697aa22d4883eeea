"""Real vision models whose memory on an A100 was published: the readings, how each model is built
and traced, and dataset rows.

The readings are facts from two public repositories: ``nvidia-smi`` memory of one A100-SXM4-40GB,
once a second, maximum, in MiB (September 2025).  Batch 32 and 128 of the ImageNet models, with the
estimates of FakeTensor, Horus and GPUMemNet (upper edge of its class):
``Assets/Results_plotter_for_paper/data.csv`` of github.com/itu-rad/GPUMemNet; the rest:
``workloads/ehsan-summary.csv`` of github.com/itu-rad/CARMA.  What ran (fp32, Adam or AdamW,
cross-entropy, last batch of an epoch smaller, names of the loop kept) is in
``Test_Pipeline/cnn_models`` and ``workloads`` there.  FakeTensor's values for Inception
are left out: they were made at 224 pixels, and it trained at 299.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import nn

from gpumemnet.errors import DatasetError
from gpumemnet.extract import ExtractOptions, extract_job
from gpumemnet.extract.module_calls import inputs_from_example
from gpumemnet.gpu import device_profile
from gpumemnet.job.dataset import write_dataset
from gpumemnet.job.measurement import Measurement
from gpumemnet.tracing.api import TraceOptions
from gpumemnet.tracing.operators.rules import Platform
from gpumemnet.tracing.timeline import Memory, steady_memory
from gpumemnet.tracing.training_loop import record
from gpumemnet.units import MIB

from .rows import PUBLISHED_CAPACITY_BYTES, PUBLISHED_GPU
from .timm_models import declare_detection

RECIPE: Final = "zoo"
"""Real models are for testing only: a split puts them into no fold."""
IMAGENET_IMAGES: Final = 1_281_167
CIFAR_IMAGES: Final = 50_000


@dataclass(frozen=True, slots=True)
class Reading:
    """One published reading, and what others estimated for it, all in MiB.

    Attributes:
        batch_size: images per step.
        measured: largest reading of the whole GPU.
        fake_tensor, horus: estimates.
        gpumemnet: upper edge of the class that GPUMemNet chose.
    """

    batch_size: int
    measured: int
    fake_tensor: float | None = None
    horus: float | None = None
    gpumemnet: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RealModel:
    """A model and its readings.

    Attributes:
        name: for people.
        home: module that holds its factory.
        factory: function of ``home`` that makes it, with ``arguments``.
        image_size: side of its square images.
        optimizer: as a job names it.
        images: of an epoch; the last batch holds what is left of them.
        readings: by batch size, rising.
    """

    name: str
    home: str
    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    image_size: int = 224
    optimizer: str = "adam"
    images: int = IMAGENET_IMAGES
    readings: tuple[Reading, ...]

    def last_batch_size(self, batch_size: int) -> int | None:
        """Images of an epoch's last step, where they are fewer."""
        return self.images % batch_size or None


def _torchvision(
    name: str, factory: str, *readings: Reading, image_size: int = 224, **arguments: Any
) -> RealModel:
    return RealModel(
        name=name,
        home="torchvision.models",
        factory=factory,
        arguments={"weights": None, **arguments},
        image_size=image_size,
        readings=readings,
    )


def _cifar(name: str, *readings: Reading) -> RealModel:
    return RealModel(
        name=f"{name}, CIFAR-100",
        home="timm",
        factory="create_model",
        arguments={"model_name": name, "num_classes": 100},
        image_size=32,
        optimizer="adamw",
        images=CIFAR_IMAGES,
        readings=readings,
    )


REAL_MODELS: Final = (
    _torchvision(
        *("VGG-16", "vgg16"),
        *(Reading(32, 6684, 3121.34, 21525.83, 16000), Reading(64, 11760, 5379.03)),
        Reading(128, 21864, 9894.40, 82119.93, 24000),
    ),
    _torchvision(
        *("ResNet-50", "resnet50"),
        *(Reading(32, 3934, 2672.52, 7903.93, 16000), Reading(64, 7106, 5337.01)),
        Reading(128, 13236, 10666.01, 28923.25, 24000),
    ),
    RealModel(
        name="Xception",
        home="timm",
        factory="create_model",
        arguments={"model_name": "xception", "num_classes": 1000},
        readings=(
            *(Reading(32, 5918, 4166.47, 8531.73, 16000), Reading(64, 11106, 8324.92)),
            Reading(128, 21236, 16641.81, 31465.36, 24000),
        ),
    ),
    _torchvision(
        *("MobileNetV2", "mobilenet_v2"),
        *(Reading(32, 3352, 2425.28, 3617.07, 8000), Reading(64, 6032, 4845.54)),
        Reading(128, 11336, 9686.07, 12028.16, 16000),
    ),
    _torchvision(
        *("EfficientNet-B0", "efficientnet_b0"),
        *(Reading(32, 3752, 2730.01, 3864.91, 8000), Reading(64, 6692, 5454.98)),
        Reading(128, 12666, 10904.91, 12999.10, 16000),
    ),
    _torchvision(
        *("Inception-v3", "inception_v3"),
        *(Reading(32, 5230, None, 5990.37, 8000), Reading(64, 9332)),
        Reading(128, 17830, None, 21288.70, 16000),
        image_size=299,
        aux_logits=False,
        init_weights=False,
    ),
    _cifar("resnet18", Reading(32, 788, 53.99), Reading(64, 796, 66.76), Reading(128, 858, 93.28)),
    _cifar(
        "resnet34", Reading(32, 1002, 94.27), Reading(64, 1016, 110.79), Reading(128, 1074, 145.31)
    ),
    _cifar(
        "mobilenetv3_small_100",
        Reading(32, 590, 15.17),
        Reading(64, 598, 25.91),
        Reading(128, 632, 49.13),
    ),
    _cifar(
        "efficientnet_b0",
        Reading(32, 666, 64.11),
        Reading(64, 720, 118.48),
        Reading(128, 866, 233.35),
    ),
)
"""In the order of the published tables' plots: ImageNet first."""


def build(model: RealModel) -> nn.Module:
    """The network on meta tensors, with no weights downloaded.

    Raises:
        DatasetError: when its library is missing, or cannot be loaded with this torch.
    """
    declare_detection()
    try:
        home = import_module(model.home)
    except (ImportError, RuntimeError) as error:  # a torchvision of another torch raises the latter
        raise DatasetError(
            f"the published real models need torchvision and timm, and {model.home} cannot be imported ({error}): "
            "pip install torchvision timm, as builds for the torch that is installed"
        ) from None
    with torch.device("meta"):
        return cast(nn.Module, getattr(home, model.factory)(**model.arguments))


def traced_memory(model: RealModel, network: nn.Module, batch_size: int) -> Memory:
    """What the trace finds for ``network``, trained as the published script trained ``model``.

    ``expected_bytes`` is the steady state, which readings once a second see.  The trace is without
    ``cudnn.benchmark``, PyTorch's
    default: nothing is searched for, and the start-up takes no more.
    """
    device = device_profile(PUBLISHED_GPU)
    options = TraceOptions(
        optimizer=model.optimizer,
        loss="cross_entropy",
        keeps_names=True,
        last_batch_size=model.last_batch_size(batch_size),
    )
    timeline = record(
        network,
        inputs_from_example(_images(model, batch_size), None),
        options,
        Platform(device=device),
    ).timeline
    return steady_memory(timeline, device)


def measurement_of_reading(
    model: RealModel, network: nn.Module, reading: Reading, traced_version: str
) -> Measurement:
    """One row; its ``options`` hold the last batch and the estimates of others, in MiB, where there
    are any.

    Args:
        model, network: the model, and itself on meta tensors.
        reading: what was read.
        traced_version: version of today's trace.
    """
    extraction = extract_job(
        network,
        _images(model, reading.batch_size),
        ExtractOptions(optimizer=model.optimizer, precision="fp32"),
    )
    replayed = traced_memory(model, network, reading.batch_size).replayed
    options = {
        "last_batch_size": model.last_batch_size(reading.batch_size),
        "fake_tensor_mib": reading.fake_tensor,
        "horus_mib": reading.horus,
        "gpumemnet_mib": reading.gpumemnet,
    }
    return Measurement(
        job=replace(extraction.job, family="cnn", traced_peak_bytes=replayed.reserved_bytes),
        status="ok",
        label_source="nvidia_smi_device_1s",
        capacity_bytes=PUBLISHED_CAPACITY_BYTES,
        provenance="published",
        gpu=PUBLISHED_GPU,
        recipe=RECIPE,
        architecture=json.dumps(
            {"model": model.name, "image_size": model.image_size}, sort_keys=True
        ),
        options=json.dumps(
            {name: value for name, value in options.items() if value is not None}, sort_keys=True
        ),
        peak_device_bytes=reading.measured * MIB,
        traced={
            "steady_reserved_bytes": replayed.reserved_bytes,
            "startup_peak_reserved_bytes": replayed.startup_peak_reserved_bytes,
            "steady_allocated_bytes": replayed.allocated_bytes,
        },
        traced_version=traced_version,
        neighbours=0,
    )


def measurements(traced_version: str) -> Iterator[Measurement]:
    """The rows of all readings, model by model; ``traced_version`` is the version of today's trace.

    Raises:
        DatasetError: as :func:`build`.
    """
    networks = [build(model) for model in REAL_MODELS]
    for model, network in zip(REAL_MODELS, networks, strict=True):
        for reading in model.readings:
            yield measurement_of_reading(model, network, reading, traced_version)


def import_real_models(out: str | Path, traced_version: str) -> int:
    """Write the dataset of the published real models to ``out``; returns the number of rows.

    Args:
        out: Parquet file.
        traced_version: version of today's trace, which the rows are marked with.

    Raises:
        DatasetError: as :func:`build`, or when ``out`` cannot be written.
    """
    return write_dataset(out, measurements(traced_version))


def _images(model: RealModel, batch_size: int) -> torch.Tensor:
    return torch.empty(batch_size, 3, model.image_size, model.image_size, device="meta")
