"""A published row says how its run ended, by rules that read the table only."""

from __future__ import annotations

import pytest

from research.published_tables.timm_models import read


def row(
    batch_size: int,
    measured: int,
    estimate: float,
    usable: str = "yes",
    model: str = "resnet50",
    classes: str = "1000",
) -> dict[str, str]:
    return {
        "model": model,
        "batch_size": str(batch_size),
        "input": "3x224x224",
        "num_classes": classes,
        "measured_mib": str(measured),
        "faketensor_mib": str(estimate),
        "usable": usable,
    }


@pytest.mark.parametrize(
    ("given", "status", "reason"),
    [
        (row(8, 4_000, 1_000.0), "ok", None),
        (
            row(128, 38_000, 40_000.0, "no"),
            "oom",
            "forward and backward pass alone take 40,000 MiB by FakeTensor",
        ),
        (
            row(8, 2_000, 1_000.0, "no", classes="512"),
            "error",
            "labels out of range: the model has 512 outputs",
        ),
        (
            row(8, 2_000, 1_000.0, "no", classes=""),
            "error",
            "the table does not say how many classes",
        ),
        (
            row(64, 37_000, 30_000.0, "no"),
            "error",
            "the reading, 37,000 MiB, is near the card's capacity",
        ),
        (row(16, 2_000, 3_000.0, "no"), "error", "is below what FakeTensor counts, 3,000 MiB"),
        (row(16, 3_000, 2_000.0, "no"), "error", "the reading does not rise with the batch size"),
    ],
)
def test_a_row_says_how_its_run_ended(
    given: dict[str, str], status: str, reason: str | None
) -> None:
    [reading] = read([given]).readings
    assert reading.fields["status"] == status
    assert reading.fields["peak_device_bytes"] == int(given["measured_mib"]) * 2**20
    assert (reason is None and reading.fields["reason"] is None) or reason in reading.fields[
        "reason"
    ]
