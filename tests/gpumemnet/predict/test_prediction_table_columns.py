"""Tables of predictions: columns that agree with single rows."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.predictor import Predictor
from tests.jobs import jobs

PREDICTOR = Predictor.default()


@settings(max_examples=30)
@given(st.lists(jobs(), min_size=1, max_size=30), st.sampled_from([None, "L4"]))
def test_columns_say_what_single_predictions_say(many: list[TrainingJob], gpu: str | None) -> None:
    predictions = PREDICTOR.predict_many(many, gpu=gpu)
    index = predictions.bin_index
    for row, prediction in enumerate(predictions):
        assert index[row] == prediction.bin_index == predictions.probabilities[row].argmax()
        assert predictions.reasons(row) == prediction.reasons
        assert predictions.in_support[row] == prediction.in_support == (not prediction.reasons)
    assert predictions.safe_bytes.tolist() == [prediction.safe_bytes for prediction in predictions]
    assert predictions.expected_bytes.tolist() == [
        prediction.expected_bytes for prediction in predictions
    ]
