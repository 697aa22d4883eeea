"""What is asked, of whom, and which of the champion's data must be available."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpumemnet.predict.bundle import Bundle, save_bundle
from gpumemnet.predict.prediction import PredictionTable
from gpumemnet.predict.predictor import NO_NUMBER
from gpumemnet.units import MIB
from models.retrain.collect import HELD_OUT_RULE, Collected, collect
from models.retrain.gate import judge
from models.retrain.judging import (
    HELD_OUT,
    NEWEST,
    answers,
    judged_parts,
    missing_comparison_data,
    newest_training_observation,
)
from tests.models.retraining import dataset, measured, observed
from tests.registries import shipped

CONTEXT = 700 * MIB


@pytest.fixture
def rows(tmp_path: Path) -> Collected:
    """Readings of one machine, and observations of a site with another context."""
    base = dataset(tmp_path / "base.parquet", measured(200, 1))
    site = dataset(tmp_path / "site.parquet", observed(measured(100, 2, context_bytes=CONTEXT)))
    return collect([base], [site])


def learned(folder: Path, sha256: str, **changes: Any) -> Bundle:
    """The shipped bundle, which says to have learned MLP jobs from the file with this hash."""
    bundle = shipped()
    sources = {"base": {"rows": 200, "sha256": sha256}}
    document = {**bundle.card.document, "families": ["mlp"], **changes}
    document["training_data"] = {**document["training_data"], "sources": sources}
    return save_bundle(folder, bundle.model, document)


def base_hash(rows: Collected) -> str:
    return rows.files[0].sha256


def test_the_champion_s_data_must_be_available(rows: Collected, tmp_path: Path) -> None:
    files = [file.sha256 for file in rows.files]
    champion = learned(tmp_path / "a", base_hash(rows))
    assert missing_comparison_data([champion], rows, files) is None
    assert "not among the files" in str(missing_comparison_data([champion], rows, []))
    others = learned(tmp_path / "b", base_hash(rows), families=["mlp", "cnn"])
    assert "no row of cnn jobs" in str(missing_comparison_data([others], rows, files))


def test_a_calibrated_champion_is_replaced_only_by_what_knows_the_site(
    rows: Collected, tmp_path: Path
) -> None:
    bundle = learned(tmp_path / "a", base_hash(rows))
    site: Any = object()
    calibrated = replace(bundle, card=replace(bundle.card, site_calibration=site))
    files = [file.sha256 for file in rows.files]
    assert missing_comparison_data([calibrated], rows, files) is None
    alone = collect([tmp_path / "base.parquet"])
    assert "is calibrated to a site" in str(missing_comparison_data([calibrated], alone, files))


def test_a_champion_that_knows_held_out_rows_answers_by_its_stand_in(
    rows: Collected, tmp_path: Path
) -> None:
    candidate = learned(tmp_path / "candidate", base_hash(rows), version="candidate")
    record = {"held_out": HELD_OUT_RULE, "datasets": [base_hash(rows)], "learned_until": 7.0}
    retrained = learned(tmp_path / "retrained", "0" * 64, retraining=record)
    assert newest_training_observation([candidate, retrained]) == 7.0
    asked = []

    def stand_ins() -> list[Bundle]:
        asked.append(1)
        return [candidate]

    judged_parts([candidate], "mlp", [retrained], stand_ins, rows)
    assert not asked
    judged_parts([candidate], "mlp", [learned(tmp_path / "a", base_hash(rows))], stand_ins, rows)
    assert asked
    asked.clear()
    judged_parts([candidate], "mlp", [learned(tmp_path / "b", "f" * 64)], stand_ins, rows)
    assert not asked  # its data are not among the rows


def test_new_files_and_the_newest_observations_decide_and_every_source_and_family_guards(
    rows: Collected, tmp_path: Path
) -> None:
    champion = learned(tmp_path / "a", base_hash(rows))
    parts = judged_parts([champion], "mlp", [champion], lambda: [champion], rows)
    names = {part.name.removeprefix("mlp, "): part for part in parts}
    assert {name for name, part in names.items() if part.decides} == {HELD_OUT, NEWEST}
    held_out = rows.is_held_out
    assert len(names[HELD_OUT]) == (held_out & rows.is_observed).sum()
    assert len(names[f"{HELD_OUT} of base.parquet"]) == (held_out & ~rows.is_observed).sum()
    assert len(names[f"{HELD_OUT} of family mlp"]) == held_out.sum()
    assert not judge(parts).promote


def test_a_site_is_asked_as_it_is_served_and_readings_of_others_with_their_context(
    rows: Collected,
) -> None:
    labels, (expected, _) = answers([shipped()], "mlp", rows.data)
    observed_rows = rows.is_observed
    errors = expected - labels
    assert np.abs(np.median(errors[~observed_rows])) < 150 * MIB
    # the catalogue's context in place of the site's
    assert np.median(errors[observed_rows]) == pytest.approx(-176 * MIB, abs=100 * MIB)
    assert labels[observed_rows].max() == pytest.approx(
        max(one.label_bytes or 0 for one in measured(100, 2, context_bytes=CONTEXT))
    )


def test_a_candidate_that_does_not_answer_with_a_number_is_noticed(
    rows: Collected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PredictionTable, "reasons", lambda table, row: (NO_NUMBER,))
    with pytest.raises(ValueError, match="no finite number"):
        answers([shipped()], "mlp", rows.data)
