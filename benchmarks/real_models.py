"""Traces real vision models whose memory on an A100 was published; prints them beside FakeTensor, Horus and GPUMemNet.

    python benchmarks/real_models.py

Needs torchvision and timm beside torch; nothing is trained.  The readings are facts from two public repositories: ``nvidia-smi``
memory of one A100-SXM4-40GB, once a second, maximum, in MiB (September 2025).  Batch 32 and 128 of the ImageNet models, with the
estimates of FakeTensor, Horus and GPUMemNet (upper edge of its class): Assets/Results_plotter_for_paper/data.csv of
github.com/itu-rad/GPUMemNet; the rest: workloads/ehsan-summary.csv of github.com/itu-rad/CARMA.  What ran (fp32, Adam or
AdamW, cross-entropy, last batch of an epoch smaller, names of the loop kept) is in Test_Pipeline/cnn_models and workloads there.
FakeTensor's values for Inception are left out: they were made at 224 pixels, and it trained at 299.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from gpumemnet.allocator import AllocatorSettings
from gpumemnet.devices import device_profile
from gpumemnet.extract.inputs import inputs_from_example
from gpumemnet.trace.memory import memory_of
from gpumemnet.trace.platform import Platform
from gpumemnet.trace.step import TraceOptions, record
from gpumemnet.trace.timeline import repeated
from gpumemnet.units import MIB

GPU = "A100"
IMAGENET_IMAGES = 1_281_167
CIFAR_IMAGES = 50_000


@dataclass(frozen=True)
class Published:
    """One reading in MiB, with what others estimated."""

    batch_size: int
    measured: int
    fake_tensor: float | None = None
    horus: float | None = None
    gpumemnet: int | None = None


@dataclass(frozen=True)
class Model:
    """A model and its readings."""

    name: str
    build: Callable[[], nn.Module]
    image: int
    optimizer: str
    images: int
    readings: tuple[Published, ...]


def models() -> list[Model]:
    try:
        import timm
        import torchvision.models as vision
    except ImportError as error:
        sys.exit(f"error: {error.name} is not installed: pip install torchvision timm")

    def imagenet(name: str, build: Callable[[], nn.Module], image: int, *readings: Published) -> Model:
        return Model(name, build, image, "adam", IMAGENET_IMAGES, readings)

    def cifar(name: str, *readings: Published) -> Model:
        return Model(f"{name}, CIFAR-100", lambda: timm.create_model(name, num_classes=100), 32, "adamw", CIFAR_IMAGES, readings)

    return [
        imagenet(
            *("VGG-16", lambda: vision.vgg16(weights=None), 224),
            *(Published(32, 6684, 3121.34, 21525.83, 16000), Published(64, 11760, 5379.03)),
            Published(128, 21864, 9894.40, 82119.93, 24000),
        ),
        imagenet(
            *("ResNet-50", lambda: vision.resnet50(weights=None), 224),
            *(Published(32, 3934, 2672.52, 7903.93, 16000), Published(64, 7106, 5337.01)),
            Published(128, 13236, 10666.01, 28923.25, 24000),
        ),
        imagenet(
            *("Xception", lambda: timm.create_model("xception", num_classes=1000), 224),
            *(Published(32, 5918, 4166.47, 8531.73, 16000), Published(64, 11106, 8324.92)),
            Published(128, 21236, 16641.81, 31465.36, 24000),
        ),
        imagenet(
            *("MobileNetV2", lambda: vision.mobilenet_v2(weights=None), 224),
            *(Published(32, 3352, 2425.28, 3617.07, 8000), Published(64, 6032, 4845.54)),
            Published(128, 11336, 9686.07, 12028.16, 16000),
        ),
        imagenet(
            *("EfficientNet-B0", lambda: vision.efficientnet_b0(weights=None), 224),
            *(Published(32, 3752, 2730.01, 3864.91, 8000), Published(64, 6692, 5454.98)),
            Published(128, 12666, 10904.91, 12999.10, 16000),
        ),
        imagenet(
            *("Inception-v3", lambda: vision.inception_v3(weights=None, aux_logits=False, init_weights=False), 299),
            *(Published(32, 5230, None, 5990.37, 8000), Published(64, 9332)),
            Published(128, 17830, None, 21288.70, 16000),
        ),
        cifar("resnet18", Published(32, 788, 53.99), Published(64, 796, 66.76), Published(128, 858, 93.28)),
        cifar("resnet34", Published(32, 1002, 94.27), Published(64, 1016, 110.79), Published(128, 1074, 145.31)),
        cifar("mobilenetv3_small_100", Published(32, 590, 15.17), Published(64, 598, 25.91), Published(128, 632, 49.13)),
        cifar("efficientnet_b0", Published(32, 666, 64.11), Published(64, 720, 118.48), Published(128, 866, 233.35)),
    ]


def traced(model: Model, network: nn.Module, batch_size: int) -> tuple[float, float]:
    """Expected and safe MiB."""
    images = torch.empty(batch_size, 3, model.image, model.image, device="meta")
    options = TraceOptions(
        optimizer=model.optimizer,
        loss="cross_entropy",
        keeps_names=True,
        last_batch_size=model.images % batch_size or None,
    )
    device = device_profile(GPU)
    timeline = record(network, inputs_from_example(images, None), options, Platform(device=device)).timeline
    memory = memory_of(repeated(timeline, 3), timeline.sizes, timeline.bounds, device, AllocatorSettings())
    return memory.expected_bytes / MIB, memory.safe_bytes / MIB


def main() -> None:
    table = Table(title=f"MiB on an {device_profile(GPU).name}, fp32", title_justify="left")
    for heading in ("model", "batch", "measured", "traced", "error", "safe", "FakeTensor", "Horus", "GPUMemNet up to", "seconds"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    errors: dict[str, list[float]] = {"trace": [], "FakeTensor": [], "Horus": []}
    above, over = 0, []
    for model in models():
        with torch.device("meta"):
            network = model.build()
        for reading in model.readings:
            start = time.perf_counter()
            expected, safe = traced(model, network, reading.batch_size)
            seconds = time.perf_counter() - start
            for name, value in (("trace", expected), ("FakeTensor", reading.fake_tensor), ("Horus", reading.horus)):
                if value is not None:
                    errors[name].append(value / reading.measured - 1)
            above += reading.measured > safe
            over.append(safe / reading.measured - 1)
            others = (reading.fake_tensor, reading.horus, reading.gpumemnet)
            table.add_row(
                *(model.name, str(reading.batch_size), f"{reading.measured:,}", f"{expected:,.0f}"),
                *(f"{expected / reading.measured - 1:+.1%}", f"{safe:,.0f}"),
                *("-" if value is None else f"{value:,.0f}" for value in others),
                f"{seconds:.1f}",
            )
    console = Console(width=130)
    console.print(table)
    for name, values in errors.items():
        absolute = [abs(value) for value in values]
        within = sum(value <= 0.05 for value in absolute)
        console.print(f"{name}: median error {statistics.median(absolute):.1%}, {within} of {len(values)} within 5 %")
    console.print(f"safe: {above} of {len(over)} readings above, median over-allocation {statistics.median(over):.1%}")


if __name__ == "__main__":
    main()
