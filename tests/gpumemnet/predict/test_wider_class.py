"""Jobs beyond the training data: the closed form answers with the bound that was calibrated on real networks."""

from dataclasses import replace
from typing import Any

import pytest

from gpumemnet.job.layers import Layer
from gpumemnet.job.training_job import TrainingJob
from gpumemnet.predict.predictor import Predictor

PREDICTOR = Predictor.default()
LAYERS = (
    Layer("embedding", 256 * 256, 30_000 * 256),
    Layer("lstm", 256 * 1024, 9_000_000),
    Layer("lstm", 256 * 1024 * 11),
    Layer("linear", 10, 10_250),
)
JOB = TrainingJob(
    family="mlp", batch_size=64, input_elements=256, sequence_length=256, optimizer="adam", precision="fp32", layers=LAYERS
)


def test_layers_that_training_never_saw_get_a_limit_when_their_memory_is_known() -> None:
    answer = PREDICTOR.predict(JOB)
    assert answer.in_support
    assert answer.reasons == ()
    assert answer.safe_bytes is not None
    assert 1.2 < answer.safe_bytes / answer.expected_bytes < 1.5
    assert answer.probabilities.sum() == pytest.approx(1.0)
    twice = PREDICTOR.predict(replace(JOB, batch_size=128))
    assert twice.safe_bytes is not None
    assert twice.safe_bytes > answer.safe_bytes


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"checkpointing": "every_block", "channels_last": True}, "channels_last"),
        ({"gradient_accumulation": 64}, "gradient_accumulation"),
        ({"layers": (*LAYERS, Layer("my_kernel", 100))}, "my_kernel"),
        ({"layers": (Layer("other", 10**6, 10**6),)}, "other"),
        ({"batch_size": 10**6}, "batch_size"),
        ({"layers": (), "total_activations": 10**6, "total_parameters": 10**6}, "sequence_length"),
    ],
)
def test_where_the_closed_form_was_not_tested_there_is_no_limit(change: dict[str, Any], reason: str) -> None:
    fields: dict[str, Any] = {"total_activations": None, "total_parameters": None, "trainable_parameters": None, **change}
    answer = PREDICTOR.predict(replace(JOB, **fields))
    assert answer.safe_bytes is None
    assert any(reason in words for words in answer.reasons)


def test_more_coverage_is_a_higher_limit() -> None:
    limits = [PREDICTOR.predict(JOB, coverage=coverage).safe_bytes for coverage in (0.5, 0.9, 0.99, 0.999)]
    assert None not in limits
    assert sorted(set(limits), key=limits.index) == sorted(limits)  # type: ignore[type-var]
