"""The evaluation table: every estimator beside the others, on families that none has seen."""

from dataclasses import replace

import pytest

from models import evaluation
from models.evaluation import evaluate, markdown_table
from models.training.classifier import plan_of
from models.training.data import LabelledJobs


def test_estimators_stand_beside_each_other(
    few: LabelledJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(plan_of("mlp"), epochs=1, folds=2, hidden=8)
    monkeypatch.setattr(evaluation, "plan_of", lambda *_: plan)
    monkeypatch.setattr(evaluation, "TREES_GROWN", 5)
    figures = evaluate(few, ["mlp"])
    assert {one.estimator for one in figures} == {
        *("line", "boosted trees", "MLP-based", "MLP-based, totals only"),
    }
    assert {one.split for one in figures} == {"family", "source"}
    own = [one for one in figures if (one.split, one.estimator) == ("family", "MLP-based")]
    for one in own:
        assert 0 < one.median_error < one.p90_error
        assert one.limit_over_request >= 1.0
        assert one.accuracy_1000 <= one.accuracy_8000
    [transformers] = [one for one in own if one.source == "published_transformer_a100"]
    assert transformers.rows == 158
    assert transformers.median_error < 0.1
    table = markdown_table(figures)
    assert len(table.splitlines()) == 2 + len(figures)
