"""Training options: one declaration, and a job that agrees with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from gpumemnet.errors import InvalidJobError
from gpumemnet.job.training_job import (
    TrainingJob,
    TrainingOptions,
)

TOTALS: dict[str, Any] = {
    "family": "mlp",
    "batch_size": 8,
    "input_elements": 4,
    "total_activations": 16,
    "total_parameters": 32,
}


def test_a_job_gives_back_its_options() -> None:
    options = TrainingOptions(
        optimizer="sgd", precision="bf16", ranks=4, channels_last=True, attention_kernel="flash"
    )
    assert TrainingJob(**TOTALS, **dataclasses.asdict(options)).options == options


@pytest.mark.parametrize(
    ("name", "value"),
    [("optimizer", None), ("precision", ["fp32"]), ("channels_last", 1), ("ranks", 2**17)],
)
def test_a_job_and_its_options_refuse_the_same_values(name: str, value: object) -> None:
    given: dict[str, Any] = {name: value}
    a_job: dict[str, Any] = {**TOTALS, "optimizer": "sgd", "precision": "fp32"}
    for refuse in (lambda: TrainingOptions(**given), lambda: TrainingJob(**a_job | given)):
        with pytest.raises(InvalidJobError, match="must be") as caught:
            refuse()
        assert caught.value.field == name


def test_counts_of_numpy_become_whole_numbers() -> None:
    assert type(TrainingOptions(ranks=np.int64(2)).ranks) is int  # type: ignore[arg-type]
