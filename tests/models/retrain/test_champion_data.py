"""The champion's training data must be available, and a step's hash covers everything that its
result depends on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpumemnet.job.job_table import JobTable
from gpumemnet.predict.bundle import Bundle, save_bundle, shipped_bundles
from gpumemnet.predict.prediction import PredictionOptions, PredictionTable
from gpumemnet.predict.predictor import Predictor
from models.retrain.collect import collect
from models.retrain.judging import (
    known_held_out_architectures,
    missing_comparison_data,
    newest_training_observation,
    without_answer,
)
from models.retrain.row_splits import HELD_OUT_RULE, RowSplit, split_rows
from models.retrain.step_cache import cached_document
from tests.models.retraining import dataset, measured

FEWEST = 15


@pytest.fixture
def split(tmp_path: Path) -> RowSplit:
    (found,), _ = split_rows(collect([dataset(tmp_path / "a.parquet", measured(200, 1))]).rows, {})
    return found


def learned(
    tmp_path: Path, provenance: str, origin: str, retraining: dict[str, object] | None = None
) -> Bundle:
    """A bundle for MLP jobs that says to have learned from the file with the hash ``origin``."""
    bundle = next(one for one in shipped_bundles() if one.card.name == "mlp-a100-published")
    document = {**bundle.card.document, "version": f"{provenance} {origin[:8]} {retraining}"}
    document["training_data"] = {
        **document["training_data"],
        "provenance": provenance,
        "sha256": origin,
    }
    return save_bundle(
        tmp_path / provenance,
        bundle.model,
        document | ({"retraining": retraining} if retraining else {}),
    )


def test_the_champion_s_rows_are_available(split: RowSplit, tmp_path: Path) -> None:
    champion = [learned(tmp_path, "published", split.origins[0])]
    assert missing_comparison_data(split, champion, [split], split.origins, FEWEST) is None
    assert "not among the files" in str(
        missing_comparison_data(split, champion, [split], [], FEWEST)
    )
    little = replace(split, held_out=split.held_out[:5])
    assert "5 rows are held out" in str(
        missing_comparison_data(little, champion, [little], split.origins, FEWEST)
    )


def test_the_data_of_a_less_trusted_model_must_be_available_too(
    split: RowSplit, tmp_path: Path
) -> None:
    after, before = learned(tmp_path, "traced", "f" * 64), learned(tmp_path, "measured", "e" * 64)
    assert "(sha256 ffffffffffff" in str(
        missing_comparison_data(split, [after], [split], split.origins, FEWEST)
    )
    assert missing_comparison_data(split, [before], [split], split.origins, FEWEST) is None


def test_a_site_s_observations_may_be_the_only_data(split: RowSplit, tmp_path: Path) -> None:
    champion = [learned(tmp_path, "published", "f" * 64)]
    assert (
        missing_comparison_data(replace(split, provenance="observed"), champion, [], [], FEWEST)
        is None
    )


def test_a_model_trained_on_all_rows_was_trained_on_held_out_ones(
    split: RowSplit, tmp_path: Path
) -> None:
    shipped = learned(tmp_path, "published", split.origins[0])
    assert known_held_out_architectures(shipped, [split]) == {
        row.measurement.architecture_key for row in split.held_out
    }
    said = {"held_out": HELD_OUT_RULE, "origins": list(split.origins), "learned_until": 7.0}
    retrained = learned(tmp_path, "observed", "0" * 64, said)
    assert known_held_out_architectures(retrained, [split]) == frozenset()
    assert known_held_out_architectures(
        learned(tmp_path, "measured", "0" * 64, said | {"held_out": "another rule"}), [split]
    )
    assert newest_training_observation([shipped, retrained]) == {"mlp": 7.0}


def test_a_candidate_that_does_not_answer_with_a_number_is_noticed(
    split: RowSplit, monkeypatch: pytest.MonkeyPatch
) -> None:
    candidate = next(one for one in shipped_bundles() if one.card.name == "mlp-a100-published")
    assert without_answer(candidate, split) == 0

    class Absurd(Predictor):
        def predict_table(
            self, jobs: JobTable, options: PredictionOptions | None = None, **keywords: Any
        ) -> PredictionTable:
            found = super().predict_table(jobs, options, **keywords)
            reasons = dict.fromkeys(range(len(jobs)), ("the model gives no number for it",))
            return PredictionTable(
                found.expected_bytes, found.expected_bytes, reasons, found.coverage, found.by_model
            )

    monkeypatch.setattr("models.retrain.judging.Predictor", Absurd)
    assert without_answer(candidate, split) > 0


def test_a_document_is_made_again_only_when_it_is_damaged_or_outdated(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "one.json"
    assert cached_document(path, lambda: {"a": 1}) == ({"a": 1}, False)
    assert cached_document(path, lambda: {"a": 2}) == ({"a": 1}, True)
    path.write_bytes(path.read_bytes()[:4])
    assert cached_document(path, lambda: {"a": 3}) == ({"a": 3}, False)
    assert cached_document(path, lambda: {"a": 4}, lambda found: found["a"] == 4) == (
        {"a": 4},
        False,
    )
    assert json.loads(path.read_bytes()) == {"a": 4}
