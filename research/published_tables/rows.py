"""What the published tables have in common: where they come from, how a cell is read, and the
measurement that a row becomes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from gpumemnet.errors import DatasetError
from gpumemnet.job.layers import describe
from gpumemnet.job.measurement import Measurement
from gpumemnet.job.training_job import TrainingJob, TrainingOptions
from gpumemnet.units import MIB

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Row = Mapping[str, str | None]
"""Column → text."""

PUBLISHED_GPU: Final = "NVIDIA A100-SXM4-40GB"
"""The GPU of GPUMemNet's published measurements."""
PUBLISHED_CAPACITY_BYTES: Final = 40_960 * MIB
"""The card's nominal memory; what its driver offered is not published."""
PUBLISHED_SECONDS: Final = 60.0

WHERE_TO_GET_IT: Final = (
    "it is Datasets/MLP/mlp_data_step2.csv, CNN/cnn_data_step1.csv or Transformers/transformer_data.csv of "
    "github.com/itu-rad/GPUMemNet (CC BY 4.0): download it from there and give its path"
)

PUBLISHED_OPTIONS: Final = TrainingOptions(optimizer="adam", precision="fp32")
"""The options that GPUMemNet held fixed (arXiv 2602.17817, section 4.1)."""


class LeftOutError(DatasetError):
    """A row that is as it was published, and whose network nobody can rebuild from it."""


def published_measurement(
    job: TrainingJob,
    architecture: DataclassInstance,
    row: Row,
    status: str = "ok",
    reason: str | None = None,
) -> Measurement:
    """The measurement of a published row.

    Args:
        job: the row's job.
        architecture: its network.
        row: the row, for its label.
        status, reason: how the job ended.

    Raises:
        DatasetError: when the row has no label.
    """
    return Measurement(
        job=job,
        status=status,
        label_source="nvidia_smi_device_1s",
        capacity_bytes=PUBLISHED_CAPACITY_BYTES,
        provenance="published",
        gpu=PUBLISHED_GPU,
        recipe="published",
        architecture=json.dumps(asdict(architecture), sort_keys=True),
        reason=reason,
        peak_device_bytes=count_in(row, "Max GPU Memory (MiB)") * MIB,
        seconds=PUBLISHED_SECONDS,
        neighbours=0,
    )


def text_in(row: Row, column: str) -> str:
    """The text in a column.

    Raises:
        DatasetError: when the row has none.
    """
    value = row.get(column)
    if value is None:
        raise DatasetError(f"{column} is missing")
    return value


def count_in(row: Row, column: str) -> int:
    """The whole number in a column.

    Raises:
        DatasetError: when there is no whole number.
    """
    text = text_in(row, column)
    if not re.fullmatch(r"\d{1,15}", text):
        raise DatasetError(f"{column} must be a whole number, not {describe(text)}")
    return int(text)
