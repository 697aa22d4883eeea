"""Published real models: the committed rows are those of the table, stand apart for testing, and a
missing library is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from gpumemnet.job.dataset import read_dataset
from gpumemnet.job.measurement import Measurement
from gpumemnet.units import MIB
from research.published_tables.real_models import (
    REAL_MODELS,
    Reading,
    RealModel,
    measurement_of_reading,
)
from research.traces.labels import PROTOCOL

COMMITTED = (
    Path(__file__).parents[3] / "dataset_builder/datasets/published_real_models_a100.parquet"
)


@pytest.fixture(scope="module")
def rows() -> list[Measurement]:
    return list(read_dataset(COMMITTED))


def test_the_committed_rows_are_the_table(rows: list[Measurement]) -> None:
    table = [(model, reading) for model in REAL_MODELS for reading in model.readings]
    assert len(rows) == len(table) == 30
    for row, (model, reading) in zip(rows, table, strict=True):
        assert json.loads(row.architecture) == {"model": model.name, "image_size": model.image_size}
        assert (row.job.batch_size, row.job.optimizer) == (reading.batch_size, model.optimizer)
        assert row.job.input_elements == 3 * model.image_size**2
        assert row.label_bytes == row.peak_device_bytes == reading.measured * MIB
        options = json.loads(row.options)
        assert options.pop("last_batch_size") == model.last_batch_size(reading.batch_size)
        others = {
            "fake_tensor_mib": reading.fake_tensor,
            "horus_mib": reading.horus,
            "gpumemnet_mib": reading.gpumemnet,
        }
        assert options == {name: value for name, value in others.items() if value is not None}


def test_a_reading_becomes_a_row() -> None:
    reading = Reading(4, 700, horus=12.5)
    model = RealModel(
        name="tiny", home="", factory="", image_size=8, images=10, readings=(reading,)
    )
    with torch.device("meta"):
        network = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(180, 2))
    row = measurement_of_reading(model, network, reading, PROTOCOL)
    assert [layer.kind for layer in row.job.layers] == ["conv2d", "relu", "linear"]
    assert row.job.total_parameters == 5 * 28 + 181 * 2
    assert (
        row.job.traced_peak_bytes
        == row.traced["steady_reserved_bytes"]
        == row.traced["startup_peak_reserved_bytes"]
        > 0
    )
    assert row.label_bytes == 700 * MIB
    assert json.loads(row.options) == {"last_batch_size": 2, "horus_mib": 12.5}
