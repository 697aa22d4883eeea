"""The CNN family: what it says about a network is what torch builds and runs, and its samples
spread as they should."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dataset_builder.families import cnn
from dataset_builder.families import cnn as space
from dataset_builder.families.cnn import CnnArchitecture
from dataset_builder.measure import training
from dataset_builder.measure.training import build_network, train
from dataset_builder.planned_job import (
    Options,
    PlannedJob,
)
from tests.nightly import every_pair

CPU = torch.device("cpu")
META = torch.device("meta")

TINY: dict[str, Any] = {
    "style": "basic",
    "image_size": 32,
    "input_channels": 3,
    "classes": 25,
    "width": 8,
    "widening": 2.0,
    "blocks": 4,
    "stages": 2,
    "profile": "even",
    "kernel": 3,
    "groups": 2,
    "expansion": 2,
    "stem": "conv",
    "downsampling": "strided",
    "upsampling": "bilinear",
    "norm": "batch_norm",
    "activation": "relu",
    "in_place": True,
    "squeeze_excitation": False,
    "block_dropout": 0.1,
    "head": "linear",
    "head_dropout": 0.2,
}


def tiny(**changes: Any) -> CnnArchitecture:
    return cnn.compose(TINY | changes)


# No strided 1 × 1 convolution in bf16 and channels_last: on some CPUs oneDNN's backward writes past
# its buffer.
RUNS = {
    "fp32": (
        {"norm": "batch_norm", "activation": "relu6", "downsampling": "strided"},
        {"frozen_share": 0.25},
    ),
    "amp_bf16": (
        {
            "norm": "layer_norm",
            "activation": "silu",
            "squeeze_excitation": True,
            "head": "hidden",
            "upsampling": "nearest",
        }
        | {"stem": "patch", "downsampling": "avg_pool"},
        {"checkpointing": "every_block", "channels_last": True},
    ),
    "bf16": (
        {
            "norm": "none",
            "activation": "elu",
            "stem": "pooled",
            "downsampling": "max_pool",
            "head": "flattened",
        }
        | {"upsampling": "conv_transpose", "squeeze_excitation": True},
        {"checkpointing": "every_block", "channels_last": True, "optimizer": "sgd_momentum"},
    ),
}


@pytest.mark.parametrize(
    ("style", "precision"), every_pair(space.FEATURES["style"].choices, tuple(RUNS))
)
def test_every_style_trains_without_a_warning(style: str, precision: str) -> None:
    features, options = RUNS[precision]
    chosen = Options(batch_size=2, precision=precision, **options)  # type: ignore[arg-type]
    network = tiny(style=style, **features)  # type: ignore[arg-type]
    planned = PlannedJob("cnn", network, chosen)
    assert train(planned, CPU, 0, lambda _: 0) == 3


def test_channels_last_reaches_weights_inputs_and_activations() -> None:
    for channels_last in (False, True):
        planned = PlannedJob(
            "cnn", tiny(input_channels=4), Options(batch_size=2, channels_last=channels_last)
        )
        seen: list[bool] = []

        def note(
            module: nn.Module,
            inputs: tuple[torch.Tensor],
            output: torch.Tensor,
            seen: list[bool] = seen,
        ) -> None:
            assert isinstance(module, nn.Conv2d)
            tensors = (
                (module.weight, *inputs, output) if module.kernel_size[0] > 1 else (*inputs, output)
            )
            seen.extend(each.is_contiguous(memory_format=torch.channels_last) for each in tensors)

        def watch(network: nn.Module, note: Any = note) -> None:
            for module in network.modules():
                if isinstance(module, nn.Conv2d):
                    module.register_forward_hook(note)

        with pytest.MonkeyPatch.context() as patch:
            build = training.build_network
            patch.setattr(
                training,
                "build_network",
                lambda *arguments, build=build: watched(build(*arguments), watch),
            )
            train(planned, CPU, 0, lambda _: 0)
        assert len(seen) >= 3 * 3
        assert set(seen) == {channels_last}


def watched(network: nn.Module, watch: Any) -> nn.Module:
    watch(network)
    return network


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_a_job_switches_cudnn_and_tf32(precision: str) -> None:
    torch.backends.cudnn.allow_tf32 = False
    options = Options(batch_size=2, precision=precision, cudnn_benchmark=precision == "fp32")
    train(PlannedJob("cnn", tiny(), options), CPU, 0, lambda _: 0)
    assert torch.backends.cudnn.benchmark is (precision == "fp32")
    assert torch.backends.cudnn.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32 is (precision == "tf32")


@pytest.mark.parametrize(
    ("changes", "batch_size", "can_train", "can_run"),
    [
        ({"image_size": 32, "stem": "pooled", "stages": 5}, 8, False, True),
        (
            {"image_size": 32, "stem": "pooled", "stages": 4},
            1,
            False,
            False,
        ),
        ({"image_size": 32, "stem": "pooled", "stages": 4}, 2, True, True),
        (
            {"image_size": 32, "stem": "pooled", "stages": 4, "norm": "group_norm"},
            8,
            False,
            True,
        ),
        ({"image_size": 32, "stem": "pooled", "stages": 4, "norm": "layer_norm"}, 1, True, True),
        ({"image_size": 33, "stem": "pooled", "stages": 4, "style": "unet"}, 2, True, True),
    ],
)
def test_a_network_that_cannot_train_is_known(
    changes: dict[str, Any], batch_size: int, can_train: bool, can_run: bool
) -> None:
    architecture = tiny(**{"blocks": 5, "widening": 1.0} | changes)
    assert cnn.can_train(architecture, batch_size) == can_train
    network = build_network(PlannedJob("cnn", architecture, Options(batch_size=batch_size)), META)
    images = torch.empty(batch_size, 3, *[architecture.image_size] * 2, device="meta")
    if can_train:
        network(images)
    elif not can_run:  # else torch would, and nobody would train it
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            network(images)


@pytest.mark.parametrize(
    ("blocks", "stages", "profile", "depths"),
    [
        (16, 4, "even", (4, 4, 4, 4)),
        (16, 4, "middle", (3, 2, 8, 3)),
        (16, 4, "late", (2, 3, 5, 6)),
        (4, 5, "late", (1, 1, 1, 1, 1)),
        (7, 1, "middle", (7,)),
    ],
)
def test_blocks_are_spread_over_the_stages(
    blocks: int, stages: int, profile: str, depths: tuple[int, ...]
) -> None:
    assert space.spread(blocks, stages, profile) == depths
