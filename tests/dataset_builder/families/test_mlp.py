"""The MLP family: its widths and what cannot train."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dataset_builder.families import mlp
from dataset_builder.planned_job import Options, PlannedJob
from gpumemnet.job.training_job import OPTIMIZERS

UNIFORM = mlp.MlpArchitecture(
    shape="uniform", input_width=3, output_width=2, hidden_widths=(4,), activation="relu"
)


def test_keys_differ_when_an_option_does() -> None:
    keys = {
        PlannedJob("mlp", UNIFORM, Options(batch_size=8, optimizer=name)).key for name in OPTIMIZERS
    }
    assert len(keys) == len(OPTIMIZERS)


@pytest.mark.parametrize(
    ("shape", "widths"),
    [
        ("pyramid", (1024, 512, 256, 128, 64)),
        ("uniform", (1024,) * 5),
        ("bottleneck", (1024, 362, 128, 362, 1024)),
        ("gradual", (1024, 821, 618, 415, 212)),
        ("residual", (1024,) * 5),
    ],
)
def test_shapes(shape: str, widths: tuple[int, ...]) -> None:
    assert mlp.hidden_widths(shape, 5, 1024, 10) == widths


@pytest.mark.parametrize("batch_norm", [True, False])
def test_batch_norm_cannot_train_on_single_samples(batch_norm: bool) -> None:
    norm = "batch_norm" if batch_norm else "layer_norm"
    architecture = replace(UNIFORM, norm=norm)
    assert mlp.can_train(architecture, 1) != batch_norm
    assert mlp.can_train(architecture, 2)
