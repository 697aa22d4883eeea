"""The challenger's questions are few, dropped rather than waited for, and never reach the
caller."""

from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client import REGISTRY

from gpumemnet.job.job_table import JobTable
from gpumemnet.predict.predictor import Predictor
from service.api.predictions import RecordBatch
from service.shadow import QUEUE_LENGTH, Shadow
from tests.jobs import small_job
from tests.registries import other_bundle


class Notes:
    def __init__(self) -> None:
        self.recorded: list[RecordBatch] = []
        self.shadowed: list[str] = []

    def record(self, record: RecordBatch) -> None:
        self.recorded.append(record)

    def record_shadow(
        self, prediction_id: str, model_sha256: str, expected_bytes: int, safe_bytes: int | None
    ) -> None:
        self.shadowed.append(prediction_id)


def count(outcome: str) -> float:
    labels = {"outcome": outcome}
    return REGISTRY.get_sample_value("gpumemnet_shadow_predictions_total", labels) or 0.0


@pytest.fixture
def records(predictor: Predictor) -> list[RecordBatch]:
    job = small_job()
    table = JobTable.from_jobs([job])
    predictions = predictor.predict_table(table)
    sha256 = next(
        bundle.sha256 for bundle in predictor.bundles if bundle.card.name == predictions.model.name
    )
    return [
        RecordBatch([str(number)], 0.0, table, predictions, sha256, "") for number in range(2000)
    ]


def test_what_is_too_much_is_dropped_and_counted(
    predictor: Predictor, records: list[RecordBatch]
) -> None:
    notes, before = Notes(), count("dropped")
    shadow = Shadow(cast(Any, notes), 1.0)
    shadow.challenge("r1", predictor)
    for (
        record
    ) in records:  # nobody takes from the queue, so this returns only if a full queue blocks nobody
        shadow.record(record)
    assert notes.recorded == records
    assert count("dropped") - before == len(records) - QUEUE_LENGTH
    shadow.withdraw()
    shadow.compare_next()
    assert notes.shadowed == []  # who was withdrawn is not asked about what was waiting


def test_a_challenger_that_cannot_answer_is_counted(
    records: list[RecordBatch], tmp_path: Path
) -> None:
    notes, before = Notes(), count("failed")
    shadow = Shadow(cast(Any, notes), 1.0)
    cnns = other_bundle(tmp_path / "cnn", "1", families=["cnn"])
    shadow.challenge("r1", Predictor([cnns]))
    shadow.record(records[0])
    shadow.compare_next()
    assert count("failed") == before + 1
    assert notes.shadowed == []


def test_nothing_need_be_stored(predictor: Predictor, records: list[RecordBatch]) -> None:
    before = count("compared")
    shadow = Shadow(None, 1.0)
    shadow.record(records[0])
    shadow.challenge("r1", predictor)
    shadow.champion_is(predictor.bundles)
    shadow.record(records[0])
    shadow.compare_next()
    assert count("compared") == before + 1
